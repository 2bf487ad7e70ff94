"""Write a store's trials, a file per problem, for replaying searches (scripts/search_study.py).

usage: export_trials.py STORE.sqlite --to benchmarks/nvidia_h200/trials

Of a config that was tried more than once the last clean trial stands, else the last one.
"""

import argparse
import re
from pathlib import Path

from autoflash.store.opening import open_store
from autoflash.store.record import Trial, TrialStatus
from autoflash.tuning.recorded import dump_trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("store", help="a file or a PostgreSQL URL")
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    store = open_store(arguments.store, read_only=True)
    studies = {(r.problem, r.target.identity): r for r in store.records()}
    arguments.to.mkdir(parents=True, exist_ok=True)
    for record in studies.values():
        trials = store.trials(record.bucket, record.target)
        trials = last_words([t for t in trials if t.problem == record.problem])
        name = re.sub(r"[^a-z0-9]+", "_", record.problem.label().lower()).strip("_")
        path = arguments.to / f"{name}.json"
        path.write_text(dump_trials(trials), encoding="utf-8")
        print(f"{path}: {len(trials)} trials")


def last_words(trials: list[Trial]) -> list[Trial]:
    """One trial of each config."""
    found: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        key = (trial.kernel, trial.config.to_json())
        if key not in found or found[key].status is not TrialStatus.ok or _clean(trial):
            found[key] = trial
    return list(found.values())


def _clean(trial: Trial) -> bool:
    return trial.status is TrialStatus.ok


if __name__ == "__main__":
    main()
