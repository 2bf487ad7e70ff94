"""A small study whose times are made up: every config's, in an order that the model can't guess."""

import shutil
import zlib
from pathlib import Path

import pytest

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.store.record import Measurement, Trial, TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning.job import Candidate
from autoflash.tuning.runner import RecordedRunner
from autoflash.tuning.search import ranked
from autoflash.tuning.versions import provenance

KERNEL = KERNELS["flash_fwd"]
VERSIONS = {"autoflash": "0.1.0", "triton": "3.6.0", "torch": "2.10.0", "cuda": "", "driver": ""}
FAILED = (
    TrialStatus.compile_error, TrialStatus.out_of_resources, TrialStatus.timeout,
    TrialStatus.crashed, TrialStatus.invalid,
)  # fmt: skip


class Lab:
    """What a synthetic study is about, and how to make its trials."""

    kernel = KERNEL
    a100 = named_target("a100")
    # 24 feasible configs on an A100.
    problem = Problem(
        batch=1, heads=2, kv_heads=1, seqlen_q=16, seqlen_k=16, head_dim=64, head_dim_v=64,
        dtype="float16", causal=True,
    )  # fmt: skip
    versions = VERSIONS

    def candidates(self, problem=None):
        """Every feasible one, as the search ranks them."""
        return ranked([self.kernel], problem or self.problem, self.a100)

    def by_speed(self, problem=None):
        """The candidates, fastest first: an order by checksum, so that no model foresees it."""
        return sorted(
            self.candidates(problem), key=lambda c: zlib.crc32(c.config.to_json().encode())
        )

    def measurement(self, ms, *, noisy=False):
        return Measurement(
            median_ms=ms,
            p20_ms=ms * 0.9,
            p80_ms=ms * 1.1,
            repeats=40,
            method="events",
            noisy=noisy,
            sm_clock_mhz=1410,
            throttle="2 other processes on the GPU" if noisy else "",
        )

    def trial(self, candidate, ms, *, status=TrialStatus.ok, problem=None, **changes):
        problem = problem or self.problem
        failed = status in FAILED
        source = render(candidate.kernel, problem, candidate.config)
        fields = {
            "problem": problem,
            "target": self.a100,
            "kernel": candidate.kernel.name,
            "config": candidate.config,
            "status": status,
            "reason": "" if status is TrialStatus.ok else f"made up: {status.value}",
            "measurement": None
            if failed
            else self.measurement(ms, noisy=status is TrialStatus.noisy),
            "shared_bytes": 4096,
            "registers": 128,
            "spills": 0,
            "provenance": provenance(VERSIONS, source.kernel_hash),
        }
        return Trial(**{**fields, **changes})

    def trials(self, statuses=None, problem=None):
        """A trial for every config: 1 ms for the fastest, each next one 1 % slower.

        ``statuses`` maps a place in that order to a status other than ok.
        """
        statuses = statuses or {}
        return [
            self.trial(c, 1.01**i, status=statuses.get(i, TrialStatus.ok), problem=problem)
            for i, c in enumerate(self.by_speed(problem))
        ]

    def runner(self, trials, kind=RecordedRunner):
        return kind(self.a100, VERSIONS, trials)

    def candidate(self, trial):
        return Candidate(kernel=KERNELS[trial.kernel], config=trial.config)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def empty_store_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creating a store takes Alembic a quarter of a second; copying one doesn't."""
    return Store(tmp_path_factory.mktemp("empty") / "empty.sqlite").path


@pytest.fixture
def store(tmp_path: Path, empty_store_file: Path) -> Store:
    return Store(shutil.copy(empty_store_file, tmp_path / "store.sqlite"))
