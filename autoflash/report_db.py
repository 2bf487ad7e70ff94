"""Tables and JSON of ``autoflash db``. What a stranger wrote is shown as text, never as markup."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autoflash.store.diff import Difference
from autoflash.store.digest import record_digest
from autoflash.store.merge import winners, words
from autoflash.store.record import TuningRecord

if TYPE_CHECKING:
    # It loads SQLAlchemy, which most commands don't need.
    from autoflash.store.sides import Side
    from autoflash.tuning.revalidate import Revalidated


def differences_table(found: list[Difference]) -> Table:
    """A line for each key that differs."""
    table = Table(show_edge=False)
    for name in ("target", "bucket", "kernel", "ours", "theirs", "wins", "why"):
        table.add_column(name, overflow="fold")
    for d in found:
        cells = (d.stands.target.name, d.key.bucket.label(), d.key.kernel)
        said = (_short(d.ours), _short(d.theirs), d.wins, d.reason)
        table.add_row(*(Text(cell) for cell in (*cells, *said)))
    if not found:
        table.caption = "the same records on both sides"
    return table


def difference_as_dict(d: Difference) -> dict[str, Any]:
    """A difference for scripts; records are named by their digests."""
    return {
        "kernel": d.key.kernel,
        "bucket": dataclasses.asdict(d.key.bucket),
        "target": d.stands.target.name,
        "wins": d.wins,
        "why": d.reason,
        "stands": record_digest(d.stands),
        "ours": d.ours and record_digest(d.ours),
        "theirs": d.theirs and record_digest(d.theirs),
        "only_ours": d.only_ours,
        "only_theirs": d.only_theirs,
    }


def side_as_dict(side: "Side") -> dict[str, Any]:
    """What was read, for scripts."""
    return {
        "where": str(side.where),
        "records": len(side.records),
        "refused": side.refused,
        "refusals": side.refusals,
        "faults": side.faults,
        "warnings": side.warnings,
        "digest": side.digest,
        "signed_by": side.signed_by,
        "verified": side.verified,
        "clean": side.clean,
    }


def stats_as_dict(side: "Side") -> dict[str, Any]:
    """Counts of the records, for scripts."""
    records = side.records
    dates = sorted(record.provenance.created_at for record in records)
    return {
        "where": str(side.where),
        "records": len(records),
        "refused": side.refused,
        "standing": len(winners(records)),
        "superseded": len(records) - len(words(records)),
        "noisy": sum(record.measurement.noisy for record in records),
        "first": dates[0] if dates else None,
        "last": dates[-1] if dates else None,
        "kinds": _counted(record.kind for record in records),
        "targets": _counted(record.target.name for record in records),
        "kernels": _counted(record.kernel for record in records),
        "origins": _counted(record.provenance.origin for record in records),
        "triton": _counted(record.provenance.triton for record in records),
    }


def stats_table(side: "Side") -> Table:
    """The same for people."""
    table = Table(show_edge=False, show_header=False)
    for name, value in stats_as_dict(side).items():
        if isinstance(value, dict):
            text = ", ".join(f"{key or 'unknown'}: {count}" for key, count in value.items())
        else:
            text = "" if value is None else str(value)
        table.add_row(name, Text(text, overflow="fold"))
    return table


def revalidated_table(found: "list[Revalidated]") -> Table:
    """A line for each bucket: what served, and what was stored instead."""
    table = Table(show_edge=False)
    for name in ("problem", "served", "now", "config", "trials"):
        table.add_column(name, overflow="fold")
    for one in found:
        record = one.result.record
        same = record is not None and _ran(record) == _ran(one.served)
        config = "" if record is None else "the same" if same else record.config.label()
        cells = (one.served.problem.label(), _short(one.served), _short(record) or "none survived")
        table.add_row(*(Text(cell) for cell in (*cells, config, str(len(one.result.trials)))))
    if not found:
        table.caption = "all records are of the present versions"
    return table


def revalidated_as_dict(one: "Revalidated") -> dict[str, Any]:
    """The same for scripts; records are named by their digests."""
    record = one.result.record
    return {
        "problem": one.served.problem.as_dict(),
        "target": one.served.target.name,
        "served": record_digest(one.served),
        "record": record and record_digest(record),
        "trials": len(one.result.trials),
        "fallen": [
            {"kernel": t.kernel, "config": dict(t.config), "status": t.status, "reason": t.reason}
            for t in one.fallen
        ],
    }


def _ran(record: TuningRecord) -> tuple[object, ...]:
    return (record.kernel, record.config)


def _counted(values: Any) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _short(record: TuningRecord | None) -> str:
    if record is None:
        return ""
    m, p = record.measurement, record.provenance
    kind = "predicted" if record.kind == "predicted" else "noisy" if m.noisy else ""
    return f"{m.median_ms:.4f} ms {kind}".rstrip() + f" ({p.origin or '?'}, {p.created_at[:10]})"
