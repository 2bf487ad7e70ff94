"""Run the GPU tests and print a short summary.

usage: gpu_check.py [PYTEST ARGUMENT ...]
"""

import subprocess
import sys

import torch

from autoflash.tuning.versions import versions


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is visible to torch")
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{torch.cuda.get_device_name()}: {found}", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "--tb=short", "--durations=8"]
    raise SystemExit(subprocess.run([*command, *sys.argv[1:]], check=False).returncode)


if __name__ == "__main__":
    main()
