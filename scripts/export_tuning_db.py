"""Write a store's best measured record of each bucket and kernel to tuning_db/<gpu>.json, for
review.

usage: export_tuning_db.py STORE.sqlite [--to tuning_db]

Records that stand in the file already are kept unless the store has better evidence of their
bucket and kernel (docs/database.md).
"""

import argparse
from pathlib import Path

from autoflash.store.exchange import dump_records, load_records
from autoflash.store.merge import winners
from autoflash.store.opening import open_store
from autoflash.store.record import TuningRecord


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("store", help="a file or a PostgreSQL URL")
    parser.add_argument("--to", type=Path, default=Path("tuning_db"))
    arguments = parser.parse_args()
    found = [
        r for r in open_store(arguments.store, read_only=True).records() if r.kind == "measured"
    ]
    for slug in sorted({record.target.slug for record in found}):
        path = arguments.to / f"{slug}.json"
        records = [record for record in found if record.target.slug == slug]
        if path.exists():
            records += load_records(path.read_text(encoding="utf-8"))[0]
        best = best_of_each(records)
        path.write_text(dump_records(best), encoding="utf-8")
        print(f"{path}: {len(best)} records")


def best_of_each(records: list[TuningRecord]) -> list[TuningRecord]:
    """The record with the best evidence of each bucket, target and kernel."""
    return list(winners(records).values())


if __name__ == "__main__":
    main()
