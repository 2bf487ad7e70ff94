"""What each choice of each Param is worth: a Markdown table from a store's trials.

usage: param_worth.py STORE.sqlite [--kernel NAME]

For every problem that was tuned: the best time with a choice over the kernel's best. 1.00 means
that the choice is in the winner, 1.10 that one gives up 10 % by taking it. The table shows the
geometric mean over the problems where the choice was tried, and the worst of them.
"""

import argparse
import math
import statistics
from collections import defaultdict

from autoflash.kernels import KERNELS
from autoflash.store.opening import open_store
from autoflash.store.record import Trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("store", help="a file or a PostgreSQL URL")
    parser.add_argument("--kernel", choices=sorted(KERNELS), default="flash_fwd")
    arguments = parser.parse_args()
    store = open_store(arguments.store, read_only=True)
    studies: dict[object, list[Trial]] = {}
    for record in store.records():
        trials = store.trials(record.bucket, record.target, arguments.kernel)
        timed = [t for t in trials if t.problem == record.problem and t.measurement is not None]
        if timed:
            studies[record.problem, record.target] = timed
    worth: dict[tuple[str, str], list[float]] = defaultdict(list)
    for trials in studies.values():
        best = min(map(_ms, trials))
        for name in trials[0].config:
            for choice in {t.config[name] for t in trials}:
                of_choice = min(_ms(t) for t in trials if t.config[name] == choice)
                worth[name, str(choice)].append(of_choice / best)
    count = sum(map(len, studies.values()))
    print(f"{len(studies)} problems, {count} timed trials of {arguments.kernel}\n")
    print("| Param | choice | mean | worst | problems |\n|---|---|---|---|---|")
    for param in KERNELS[arguments.kernel].space.params:
        for choice in map(str, param.choices):
            if ratios := worth.get((param.name, choice)):
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                row = (param.name, choice, f"{mean:.3f}", f"{max(ratios):.2f}", str(len(ratios)))
                print(f"| {' | '.join(row)} |")


def _ms(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.median_ms


if __name__ == "__main__":
    main()
