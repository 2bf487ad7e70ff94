"""The table and JSON of ``autoflash db coverage``."""

from collections import Counter
from typing import Any

from rich.table import Table
from rich.text import Text

from autoflash.coverage import LEVELS, Cell
from autoflash.store.parts import TARGET_FIELDS

_LEVEL_STYLES = dict(zip(LEVELS, ("green", "yellow", "yellow", "red"), strict=True))


def coverage_table(cells: list[Cell]) -> Table:
    """A row for each problem, a column for each target."""
    targets = list(dict.fromkeys(cell.target for cell in cells))
    names = Counter(target.name for target in targets)
    table = Table(show_edge=False)
    table.add_column("problem")
    for t in targets:
        alike = f" ({t.sm_count} SMs, {t.memory_gib} GiB)" if names[t.name] > 1 else ""
        table.add_column(Text(t.name + alike, overflow="fold"))
    rows: dict[str, list[Text]] = {}
    for cell in cells:
        text = Text(_level_in_words(cell), style=_LEVEL_STYLES[cell.level])
        rows.setdefault(cell.problem.label(), []).append(text)
    for label, row in rows.items():
        table.add_row(label, *row)
    counts = _levels(cells)
    table.caption = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    table.caption_justify = "left"
    return table


def coverage_as_dict(cells: list[Cell], require: str, met: bool) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "require": require,
        "met": met,
        "counts": _levels(cells),
        "cells": [
            {
                "problem": cell.problem.as_dict(),
                "target": {name: getattr(cell.target, name) for name in TARGET_FIELDS},
                "level": cell.level,
                "expected_loss": cell.expected_loss,
                "kernel": cell.choice and cell.choice.kernel.name,
                "config": cell.choice and dict(cell.choice.config),
                "layer": cell.choice and cell.choice.layer,
                "why": cell.why,
            }
            for cell in cells
        ],
    }


def _levels(cells: list[Cell]) -> dict[str, int]:
    counts = Counter(cell.level for cell in cells)
    return {level: counts[level] for level in LEVELS}


def _level_in_words(cell: Cell) -> str:
    if cell.level != "neighbour":
        return cell.level
    if cell.expected_loss is None:
        return "neighbour, loss unknown"
    return f"neighbour, {cell.expected_loss:+.1%}"
