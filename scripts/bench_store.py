"""Fill a store and time what serving and tuning ask of it.

    python scripts/bench_store.py /tmp/bench.sqlite --empty /tmp/empty.sqlite
    python scripts/bench_store.py postgresql+psycopg://user@host/an_empty_database

The store is made of many problems, each with its records and trials; give one that may be filled.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from sqlalchemy import func, insert, select

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.settings import place_of
from autoflash.store.base import AnyStore
from autoflash.store.collecting import paused_collector
from autoflash.store.jsonl import dump
from autoflash.store.models import TrialRow
from autoflash.store.opening import open_store
from autoflash.store.record import Measurement, Provenance, Trial, TrialStatus, TuningRecord
from autoflash.store.sides import read_side
from autoflash.target import named_target

KERNEL = KERNELS["flash_fwd"]
TARGETS = [named_target(name) for name in ("h200", "h100", "a100", "b200")]
PROVENANCE = Provenance(
    autoflash="0", triton="0", torch="0", cuda="", driver="", source_hash="bench",
    created_at="2025-01-01T00:00:00+00:00", origin="bench",
)  # fmt: skip
BATCH = 5000
CROWD = 200
ADDED_TRIALS = 20_000
# What a serving process does before its first launch: the bucket isn't in the store, so that it
# must look for neighbours.
SERVING = """
from autoflash.problem import Bucket, Problem
from autoflash.store.layers import Layers
from autoflash.target import named_target
problem = Problem(batch=2, heads=999, kv_heads=999, seqlen_q=4096, seqlen_k=4096, head_dim=128,
                  head_dim_v=128, dtype="bfloat16", causal=True)
Layers().lookup(Bucket.of(problem), named_target("h200"))
"""


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
        # As in life few records have these in common.
        stamp = f"2025-01-01T{index // 3600 % 24:02}:{index // 60 % 60:02}:{index % 60:02}+00:00"
        own_hash = f"{index * 2**200:064x}"
        common = {
            "problem": problem, "target": target, "kernel": KERNEL.name,
            "config": KERNEL.default(problem, target),
            "provenance": dataclasses.replace(
                PROVENANCE, created_at=stamp, source_hash=own_hash
            ),
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


def multiply(store: AnyStore, count: int) -> float:
    """Copy the trials within the database, each time as another GPU's, until there are ``count``:
    through the store that would take most of an hour."""
    begin = time.perf_counter()
    columns = [column for column in TrialRow.__table__.columns if column.name != "id"]
    with store._session("copy trials") as session:
        connection = session.connection()
        own = connection.execute(select(func.count(), func.max(TrialRow.id))).one()
        for copy in range(1, count // own[0]):
            changed = {
                "target_name": TrialRow.target_name + f" #{copy}",
                "digest": func.substr(TrialRow.digest, 1, 58) + f"{copy:06}",
            }
            copied = select(*(changed.get(column.name, column) for column in columns))
            names = [column.name for column in columns]
            rows = copied.where(TrialRow.id <= own[1])
            connection.execute(insert(TrialRow.__table__).from_select(names, rows))
    return time.perf_counter() - begin


def crowd() -> list[TuningRecord]:
    """200 records of one bucket: 20 origins that each tuned it ten times."""
    one = next(nouns(TuningRecord, 1, 1))
    assert isinstance(one, TuningRecord)
    problem = dataclasses.replace(one.problem, batch=3, head_dim=96, head_dim_v=96)
    return [
        dataclasses.replace(
            one,
            problem=problem,
            measurement=dataclasses.replace(one.measurement, median_ms=1 + index % 7 / 10),
            provenance=dataclasses.replace(
                PROVENANCE,
                origin=f"host-{index % 20}",
                created_at=f"2025-01-{1 + index // 20:02}T00:00:00+00:00",
            ),
        )
        for index in range(CROWD)
    ]


def timed(what: str, ask: Callable[[], object], count: int) -> None:
    """Print how long one takes, in ms, and how much of that this process computes."""
    times = []
    computing = time.process_time()
    for _ in range(count):
        begin = time.perf_counter()
        ask()
        times.append((time.perf_counter() - begin) * 1000)
    mean = (time.process_time() - computing) / count * 1000
    times.sort()
    print(
        f"{what}: median {times[count // 2]:.2f} ms, p99 {times[int(count * 0.99)]:.2f} ms, "
        f"computing {mean:.2f} ms",
        flush=True,
    )


def starting(store: str, count: int = 9) -> float:
    """How long a process takes from its first line to its first answer, in ms: the median."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", SERVING], check=True, env=os.environ | {"AUTOFLASH_DB": store}
        )
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def fill_all(store: AnyStore, records: int, trials: int) -> None:
    """With ``records`` and ``trials``, and the crowd."""
    for kind, count, of_each, add in (
        (TuningRecord, records, 2, store.add_records),
        (Trial, min(trials, ADDED_TRIALS), 100, store.add_trials),
    ):
        seconds = fill(add, nouns(kind, count, of_each))
        print(f"{count} {kind.__name__}s added in {seconds:.1f} s", flush=True)
    seconds = multiply(store, trials)
    print(f"{trials} Trials, copied in {seconds:.1f} s", flush=True)
    store.add_records(crowd())


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="a path, or the URL of a PostgreSQL database; it is filled")
    parser.add_argument("--empty", help="another one of the same kind, to compare start-up with")
    parser.add_argument("--filled", action="store_true", help="it was filled by an earlier run")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=1_000_000)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    if not arguments.filled:
        fill_all(store, arguments.records, arguments.trials)
    bucket, target = crowd()[0].bucket, crowd()[0].target
    some = itertools.islice(nouns(TuningRecord, arguments.records, 2), 0, None, 97)
    asked = itertools.cycle([(record.bucket, record.target) for record in some])
    missing = dataclasses.replace(next(asked)[0], batch_heads=2**20)
    for read_only in (False, True):
        opened = open_store(arguments.store, read_only=read_only)
        how = "read-only" if read_only else "writable"
        timed(f"best, {how}", lambda: opened.best(*next(asked)), 500)  # noqa: B023
        timed(f"best of {CROWD}, {how}", lambda: opened.best(bucket, target), 500)  # noqa: B023
        timed(f"answer to what is not there, {how}", lambda: opened.answer(missing, target), 50)  # noqa: B023
    if arguments.empty:
        open_store(arguments.empty)
        filled, empty = starting(arguments.store), starting(arguments.empty)
        print(f"start-up to the first answer: {filled:.0f} ms, with an empty store {empty:.0f} ms")
    begin, computing = time.perf_counter(), time.process_time()
    with paused_collector():
        side = read_side(place_of(arguments.store))
        dump(side.records)
    count = len(side.records)
    rates = count / (time.perf_counter() - begin), count / (time.process_time() - computing)
    print(f"export: {count} records, {rates[0]:.0f} a second, {rates[1]:.0f} a second of computing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
