"""How soon the tuner's search finds the best, beside random order and the written model's: replayed
over spaces that were timed to their end. A table, JSON and a plot.

usage: search_study.py FILE.json... [--trials 150] [--seeds 20] [--depth 14]
                       [--out FILE.json] [--plot FILE.svg]

The files are recorded trials (scripts/export_trials.py) of one target, all feasible configs of a
problem in each. "tuner" starts, as a tune does, from the winners of the other files whose config
carries over and from the kernels' defaults. --trials is what the default budget affords, --depth
how many candidates are under way at a time.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoflash.kernels import KERNELS
from autoflash.tuning.job import Candidate
from autoflash.tuning.known import defaults
from autoflash.tuning.recorded import load_trials
from autoflash.tuning.replay import (
    Asking,
    Space,
    Telling,
    at_random,
    best_so_far,
    by_search,
    in_order,
    trials_to_reach,
)

_GOAL = 0.98
_NEIGHBOURS = 3
_TOP = 10

Way = Callable[[int], tuple[Asking, Telling]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--trials", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    spaces = [Space(trials=load_trials(path.read_text("utf-8"))) for path in arguments.files]
    rows = [study(space, spaces, arguments) for space in spaces]
    Console(width=150).print(table(rows, arguments.trials))
    print("\n".join(verdicts(rows)))
    if arguments.out:
        options = {n: getattr(arguments, n) for n in ("trials", "seeds", "depth")}
        arguments.out.write_text(json.dumps({**options, "rows": rows}, indent=1) + "\n", "utf-8")
    if arguments.plot:
        plot(rows, arguments.plot)


def study(space: Space, spaces: Sequence[Space], arguments: argparse.Namespace) -> dict[str, Any]:
    """One space: the median course of each way of searching, and what it takes to the goal."""
    ranking = space.compiled_ranking()
    warm = advice(space, spaces)
    ways: dict[str, Way] = {
        "tuner": lambda seed: by_search(space, warm, seed),
        "tuner, no warm start": lambda seed: by_search(space, [], seed),
        "random": lambda seed: at_random(space, seed),
        "offline order": lambda seed: in_order(ranking),
    }
    # Nothing is random about an order.
    seeds = {name: 1 if name == "offline order" else arguments.seeds for name in ways}
    # A tune ends with its budget; the others go on, to tell how long they would have taken.
    ends = {name: arguments.trials if "tuner" in name else len(space.trials) for name in ways}
    courses = {
        name: [
            best_so_far(space, *way(seed), count=ends[name], depth=arguments.depth)
            for seed in range(seeds[name])
        ]
        for name, way in ways.items()
    }
    reached = {
        name: [trials_to_reach(shares, _GOAL) or len(space.trials) for shares in found]
        for name, found in courses.items()
    }
    at_budget = {
        name: [shares[min(arguments.trials, len(shares)) - 1] for shares in found]
        for name, found in courses.items()
    }
    times = space.times
    top = [ms for c in ranking[:_TOP] if (ms := times[c]) is not None]
    return {
        "problem": space.trials[0].problem.label(),
        "target": space.trials[0].target.name,
        "space": len(space.trials),
        "best_ms": space.best_ms,
        "trials_to_98": {name: statistics.median(found) for name, found in reached.items()},
        "at_budget": {name: round(statistics.median(f), 4) for name, f in at_budget.items()},
        "at_budget_worst": {name: round(min(found), 4) for name, found in at_budget.items()},
        "offline_top10": round(space.best_ms / min(top), 4) if top else 0.0,
        "course": {name: _median_course(found) for name, found in courses.items()},
    }


def advice(space: Space, spaces: Sequence[Space]) -> list[Candidate]:
    """The winners of the nearest other spaces that carry over, and the kernels' defaults."""
    problem, target = space.trials[0].problem, space.trials[0].target
    near = []
    for other in spaces:
        distance = space.trials[0].bucket.distance(other.trials[0].bucket)
        if other is not space and distance is not None:
            times = {c: ms for c, ms in other.times.items() if ms is not None}
            near.append((distance, len(near), min(times, key=times.__getitem__)))
    winners = [candidate for *_, candidate in sorted(near, key=lambda item: item[:2])]
    kernels = [KERNELS[name] for name in sorted({trial.kernel for trial in space.trials})]
    return winners[:_NEIGHBOURS] + defaults(problem, target, kernels)


def _median_course(courses: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.median(step), 4) for step in zip(*courses, strict=False)]


def table(rows: list[dict[str, Any]], trials: int) -> Table:
    """A line per problem and way."""
    found = Table(title=f"Replayed searches; budget: {trials} trials", show_edge=False)
    names = ("problem", "space", "search", "trials to 98 %", "at the budget", "worst seed")
    for name in names:
        found.add_column(name, justify="left" if name in ("problem", "search") else "right")
    for row in rows:
        for name, count in row["trials_to_98"].items():
            found.add_row(
                row["problem"], str(row["space"]), name, f"{count:.0f}",
                f"{row['at_budget'][name]:.1%}", f"{row['at_budget_worst'][name]:.1%}",
            )  # fmt: skip
    return found


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What the spaces say together."""
    at_budget = [row["at_budget"]["tuner"] for row in rows]
    median, worst = statistics.median(at_budget), min(r["at_budget_worst"]["tuner"] for r in rows)
    ratios = [row["trials_to_98"]["random"] / row["trials_to_98"]["tuner"] for row in rows]
    tops = ", ".join(f"{row['offline_top10']:.1%}" for row in rows)
    return [
        f"the budget reaches {median:.1%} in the median, {worst:.1%} at worst",
        f"best of the offline order's first {_TOP}: {tops}",
        f"random takes {min(ratios):.1f} to {max(ratios):.1f} times the tuner's trials to "
        f"{_GOAL:.0%}, {statistics.median(ratios):.1f} in the median",
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Best so far against trials, a panel per problem."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "autoflash"
    from matplotlib import pyplot

    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.4 * lines), squeeze=False, sharey=True
    )
    for panel, row in zip(panels.flat, rows, strict=False):
        for name, course in row["course"].items():
            panel.plot(range(1, len(course) + 1), [100 * share for share in course], label=name)
        panel.set(xscale="log", ylim=(60, 100.5), title=row["problem"])
        panel.axhline(100 * _GOAL, color="grey", linewidth=0.5)
    for panel in panels[-1]:
        panel.set_xlabel("trials")
    for line in panels:
        line[0].set_ylabel("% of the best rate")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
