"""Published claims beside our numbers: result files of ``experiments``, their table and their figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runflat.report.figures import lines_figure
from runflat.sim.tables import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number that somebody published, or that a formula gives, beside ours."""

    what: str
    wanted: float
    """Published or closed-form value."""
    ours: float
    low: float
    """Least value of ours that counts as reproduced."""
    high: float
    """Greatest value that does."""
    source: str
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether ours is inside the tolerance."""
        return self.low <= self.ours <= self.high


def near(what: str, wanted: float, ours: float, tolerance: float, source: str, note: str = "") -> Row:
    """A row that is met within ``tolerance`` on both sides."""
    return Row(
        what=what,
        wanted=wanted,
        ours=ours,
        low=wanted - tolerance,
        high=wanted + tolerance,
        source=source,
        note=note,
    )


def below(what: str, limit: float, ours: float, source: str, note: str = "") -> Row:
    """A row that is met at or below ``limit``."""
    return Row(what=what, wanted=limit, ours=ours, low=float("-inf"), high=limit, source=source, note=note)


def above(what: str, limit: float, ours: float, source: str, note: str = "") -> Row:
    """A row that is met at or above ``limit``."""
    return Row(what=what, wanted=limit, ours=ours, low=limit, high=float("inf"), source=source, note=note)


def claim_table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    head = ["what", "published or formula", "ours", "met"]
    body = [[row.what, f"{row.wanted:.4g}", f"{row.ours:.4g}", "yes" if row.met else "no"] for row in rows]
    notes = [f"{row.what}: {row.note}" for row in rows if row.note]
    return "\n".join([columns([head, *body]), *notes])


def line(label: str, x: Sequence[float], y: Sequence[float], style: str = "o-", like: str = "") -> dict[str, object]:
    """One line of a figure; ``like`` is the label of an earlier line whose color it takes."""
    return {"label": label, "x": list(x), "y": list(y), "style": style, "like": like}


def figure(
    title: str, x_label: str, y_label: str, lines: Sequence[Mapping[str, object]], *, x_log: bool = False
) -> dict[str, object]:
    """The figure of a result file."""
    return {"title": title, "x_label": x_label, "y_label": y_label, "lines": list(lines), "x_log": x_log}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one experiment found."""

    name: str
    rows: tuple[Row, ...]
    figure: Mapping[str, object]
    config: Mapping[str, object]


def save_claim(claim: Claim, folder: Path) -> None:
    """Print the table; write ``result.json`` and ``figure.png`` into ``folder``."""
    print(claim_table(claim.rows))
    rows = [{**asdict(row), "met": row.met} for row in claim.rows]
    for row in rows:
        for side in ("low", "high"):
            if abs(row[side]) == float("inf"):
                row[side] = None
    data = {"name": claim.name, "rows": rows, "figure": dict(claim.figure), "config": dict(claim.config)}
    result = folder / "result.json"
    result.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    lines_figure(result, folder / "figure.png")
