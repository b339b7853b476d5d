"""A figure as frozen data: drawn as SVG (`svg`) or PNG (`png`), and written as CSV, all from the same numbers.

Colours are names that the page's style sheet turns into light and dark ones.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

Values = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: `y` over `x`, None where there is a gap; `low` and `high` make a band around it."""

    label: str
    x: tuple[float, ...]
    y: Values
    color: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    is_step: bool = False
    """Hold each value until the next."""
    is_dashed: bool = False
    has_dots: bool = False

    def __post_init__(self) -> None:
        """Check the lengths.

        Raises:
            ValueError: a value for each x is missing, or there are too many.
        """
        if len(self.y) != len(self.x) or {len(self.low), len(self.high)} not in ({0}, {len(self.x)}):
            raise ValueError(f"line {self.label!r} has {len(self.x)} x and {len(self.y)} y, or an unequal band")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at `x`: a vertical line with a sign on top and words for whoever points at it."""

    x: float
    label: str
    sign: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines over a common axis. `unit` is appended to values for people; "%" multiplies shares by 100."""

    key: str
    title: str
    says: str
    """What it shows, in a sentence."""
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    unit: str = ""
    from_zero: bool = True
    to_one: bool = False
    """The axis reaches at least 1 (100 %)."""
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: parts laid end to end, and words behind them."""

    label: str
    parts: tuple[tuple[str, float], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Rows of bars on one scale; `colors` names the colour of each part, in the order of the legend."""

    key: str
    title: str
    says: str
    x_label: str
    bars: tuple[Bar, ...]
    colors: tuple[tuple[str, str], ...]
    unit: str = ""
    num_left_out: int = 0
    """Rows that are in the CSV but not drawn are the last ones of `bars`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One bar of a waterfall, as a share of the whole: "whole" and "rest" stand on the ground, a "loss" hangs."""

    label: str
    share: float
    color: str
    kind: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From 100 % down to what is left."""

    key: str
    title: str
    says: str
    falls: tuple[Fall, ...]


Figure = Lines | Bars | Waterfall


def to_csv(figure: Figure) -> str:
    """The numbers of a figure, all of them, with a head line."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    if isinstance(figure, Waterfall):
        write(["part", "share"])
        for fall in figure.falls:
            write([fall.label, repr(fall.share)])
    elif isinstance(figure, Bars):
        names = [name for name, _ in figure.colors]
        write(["row", *names, "note"])
        for bar in figure.bars:
            values = dict(bar.parts)
            write([bar.label, *(_cell(values.get(name)) for name in names), bar.note])
    else:
        write(["line", figure.x_label, figure.y_label, "low", "high"])
        for line in figure.lines:
            for index, x in enumerate(line.x):
                band = (line.low[index], line.high[index]) if line.low else (None, None)
                write([line.label, repr(x), _cell(line.y[index]), *map(_cell, band)])
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


def table(figure: Figure, most: int = 200) -> tuple[list[str], list[list[str]], int]:
    """(head, rows, number of rows left out) of the CSV, for a table on a page."""
    head, *rows = list(csv.reader(io.StringIO(to_csv(figure))))
    empty = [column for column in range(len(head)) if not any(row[column] for row in rows)]
    kept = [column for column in range(len(head)) if column not in empty]
    shown = [[row[column] for column in kept] for row in rows[:most]]
    return [head[column] for column in kept], shown, max(len(rows) - most, 0)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`, with 2 and 5 where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**exponent for exponent in exponents if low * 0.999 <= 10.0**exponent <= high * 1.001]
    if len(found) > 2:
        return found[:: max(len(found) // 6, 1)]
    every = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    return [value for value in every if low * 0.999 <= value <= high * 1.001]


def people(value: float, unit: str = "") -> str:
    """A number for people: three or four digits, thousands with k, M, G; shares as per cent where the unit says so."""
    if unit == "%":
        share = 100 * value
        return f"{share:.4g} %" if abs(share) >= 10 else f"{share:.3g} %"
    size = abs(value)
    for sign, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor * 0.9995 and not (sign == "k" and size < 1e4):
            return f"{value / factor:.4g} {sign}{unit}".strip()
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def decimate(x: Sequence[float], y: Sequence[float | None], most: int) -> list[int]:
    """Indices of about `most` points that look the same: the first, least, greatest and last of each stretch."""
    if len(x) <= most:
        return list(range(len(x)))
    stretch = math.ceil(len(x) / (most / 4))
    kept: set[int] = set()
    for start in range(0, len(x), stretch):
        span = range(start, min(start + stretch, len(x)))
        known = [index for index in span if y[index] is not None]
        kept |= {span[0], span[-1]}
        if known:
            kept.add(min(known, key=lambda index: y[index] or 0.0))
            kept.add(max(known, key=lambda index: y[index] or 0.0))
    return sorted(kept)
