"""Fill a store and time what serving and tuning ask of it.

    python scripts/bench_store.py /tmp/bench.sqlite
    python scripts/bench_store.py postgresql+psycopg://user@host/an_empty_database

The store is made of many problems, each with its records and trials; give one that may be filled.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.store.opening import open_store
from autoflash.store.record import Measurement, Provenance, Trial, TrialStatus, TuningRecord
from autoflash.target import named_target

KERNEL = KERNELS["flash_fwd"]
TARGETS = [named_target(name) for name in ("h200", "h100", "a100", "b200")]
PROVENANCE = Provenance(
    autoflash="0", triton="0", torch="0", cuda="", driver="", source_hash="bench",
    created_at="2025-01-01T00:00:00+00:00", origin="bench",
)  # fmt: skip
BATCH = 5000


def problems() -> Iterator[Problem]:
    """Each of a bucket of its own."""
    sizes = itertools.product(
        range(12), range(4, 16), range(4, 16), (64, 128), (True, False), ("float16", "bfloat16")
    )
    for batch, q, k, dim, causal, dtype in sizes:
        yield Problem(
            batch=2**batch, heads=8, kv_heads=8, seqlen_q=2**q, seqlen_k=2**k, head_dim=dim,
            head_dim_v=dim, dtype=dtype, causal=causal,
        )  # fmt: skip


def nouns(kind: type, count: int, of_each: int) -> Iterator[TuningRecord | Trial]:
    """``count`` records or trials, ``of_each`` for every problem and target."""
    places = itertools.product(problems(), TARGETS)
    made = (pair for pair in places for _ in range(of_each))
    for index, (problem, target) in enumerate(itertools.islice(made, count)):
        ms = 1 + index % 97 / 100
        common = {
            "problem": problem, "target": target, "kernel": KERNEL.name,
            "config": KERNEL.default(problem, target), "provenance": PROVENANCE,
            "measurement": Measurement(
                median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=40, method="events", noisy=False,
                sm_clock_mhz=None, throttle="",
            ),
        }  # fmt: skip
        own = {"kind": "measured"} if kind is TuningRecord else {"status": TrialStatus.ok}
        yield kind(**common, **own)


def fill(add: Callable[[list], None], made: Iterator) -> float:
    begin = time.perf_counter()
    while batch := list(itertools.islice(made, BATCH)):
        add(batch)
    return time.perf_counter() - begin


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="a path, or the URL of a PostgreSQL database")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=1_000_000)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    for kind, count, of_each, add in (
        (TuningRecord, arguments.records, 2, store.add_records),
        (Trial, arguments.trials, 100, store.add_trials),
    ):
        seconds = fill(add, nouns(kind, count, of_each))
        print(f"{count} {kind.__name__}s added in {seconds:.1f} s")
    asked = [
        (record.bucket, record.target)
        for record in itertools.islice(nouns(TuningRecord, arguments.records, 2), 0, None, 97)
    ]
    for read_only in (False, True):
        opened = open_store(arguments.store, read_only=read_only)
        times = []
        for bucket, target in asked:
            begin = time.perf_counter()
            if opened.best(bucket, target) is None:
                print(f"no record of {bucket} on {target.name}", file=sys.stderr)
                return 1
            times.append((time.perf_counter() - begin) * 1000)
        times.sort()
        print(
            f"best, {'read-only' if read_only else 'writable'}: median "
            f"{statistics.median(times):.2f} ms, p99 {times[int(len(times) * 0.99)]:.2f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
