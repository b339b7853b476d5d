"""Results of `runflat simulate`, `sweep`, `advise` and `compare` as figures, from their result files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runflat.cluster.ledger import Category
from runflat.report.chart import Bar, Bars, Figure, Line, Lines, people
from runflat.report.run_figures import CATEGORY_COLORS, CATEGORY_WORDS

COLORS = ("blue", "orange", "green", "purple", "teal", "brown", "pink", "grey")
"""Colours of strategies and runs, in order."""

Result = Mapping[str, Any]


def color_of(index: int) -> str:
    """The colour of the strategy or run with this number."""
    return COLORS[index % len(COLORS)]


def simulation_figures(data: Result) -> list[Figure]:
    """The figures of a result of `runflat simulate`.

    Raises:
        LookupError, TypeError, ValueError: the file is not such a result.
    """
    rows: Sequence[Result] = data["results"]
    figures: list[Figure | None] = [
        _goodput(rows),
        _throughput(rows),
        _losses(rows),
        _series(rows, "live", "availability", "Availability", "Share of devices in service, first draw."),
        _spares(rows),
        _series(rows, "reduced", "reduced", "Groups at a lower degree", "How many groups go on with fewer devices."),
        _watts(rows),
    ]
    return [figure for figure in figures if figure is not None]


def goodput_bars(rows: Iterable[tuple[str, float, str]], says: str = "") -> Figure | None:
    """(strategy, goodput, note) as bars; `says` is added to what goodput is. None where there is no strategy."""
    bars = tuple(Bar(label=label, parts=(("goodput", goodput),), note=note) for label, goodput, note in rows)
    if not bars:
        return None
    return Bars(
        key="goodput",
        title="Goodput of each strategy",
        says="Tokens committed, over those that all devices held (spares too) would have committed without failure"
        + (f"; {says}." if says else "."),
        x_label="goodput",
        unit="%",
        bars=bars,
        colors=(("goodput", "green"),),
    )


def _goodput(rows: Sequence[Result]) -> Figure | None:
    """Goodput of each strategy, with the spread over draws in words."""
    found = []
    for row in rows:
        band = row["goodput"]
        note = f"{people(band['mean'], '%')}  ({people(band['p5'], '%')} to {people(band['p95'], '%')})"
        found.append((str(row["candidate"]), float(band["mean"]), note))
    return goodput_bars(found, "in brackets 5 to 95 % of draws")


def _throughput(rows: Sequence[Result]) -> Figure | None:
    lines = []
    for index, row in enumerate(rows):
        if row["grid_throughput"]:
            low, mean, high = zip(*row["grid_throughput"], strict=True)
            x = tuple(float(day) for day in row["grid_days"])
            lines.append(
                Line(
                    label=str(row["candidate"]),
                    x=x,
                    y=tuple(map(float, mean)),
                    low=tuple(map(float, low)),
                    high=tuple(map(float, high)),
                    color=color_of(index),
                )
            )
    if not lines:
        return None
    return Lines(
        key="throughput",
        title="Throughput over time",
        says="Mean over draws of failures; the bands hold 5 to 95 % of them.",
        x_label="days",
        y_label="throughput over that of the healthy job",
        lines=tuple(lines),
        unit="%",
        from_zero=False,
    )


def _losses(rows: Sequence[Result]) -> Figure | None:
    """Where the device-hours went that were not productive, strategy by strategy."""
    names = [name for name in rows[0]["ledger_device_h"] if name != Category.PRODUCTIVE.value]
    bars = []
    for row in rows:
        hours = row["ledger_device_h"]
        total = sum(hours.values()) or 1.0
        parts = tuple((_words(name), hours[name] / total) for name in names)
        lost = sum(share for _, share in parts)
        bars.append(Bar(label=str(row["candidate"]), parts=parts, note=people(lost, "%")))
    colors = tuple((_words(name), _color(name)) for name in names)
    return Bars(
        key="losses",
        title="Where the time went",
        says="Device-hours that were not productive, as a share of all that the job held.",
        x_label="share of all device-hours",
        unit="%",
        bars=tuple(bars),
        colors=colors,
    )


def _words(name: str) -> str:
    return CATEGORY_WORDS[Category(name)] if name in Category.__members__.values() else name


def _color(name: str) -> str:
    return CATEGORY_COLORS[Category(name)] if name in Category.__members__.values() else "grey"


def _series(rows: Sequence[Result], key: str, name: str, title: str, says: str) -> Figure | None:
    """One of the series that were kept of the first draw; equal ones are drawn once."""
    lines: list[Line] = []
    for index, row in enumerate(rows):
        series = row.get("series")
        if not series or not series[key]:
            continue
        x = tuple(float(time_s) / 86_400 for time_s in series["time_s"])
        y = tuple(float(value) for value in series[key])
        if any(line.y == y for line in lines):
            continue
        lines.append(Line(label=str(row["candidate"]), x=x, y=y, color=color_of(index), is_step=True))
    if not lines or not any(value for line in lines for value in line.y):
        return None
    is_share = key == "live"
    if len(lines) == 1 and is_share:
        lines = [Line(label="in service", x=lines[0].x, y=lines[0].y, color="teal", is_step=True)]
    return Lines(
        key=name,
        title=title,
        says=says,
        x_label="days",
        y_label="share of devices" if is_share else "groups",
        lines=tuple(lines),
        unit="%" if is_share else "",
        from_zero=not is_share,
    )


def _spares(rows: Sequence[Result]) -> Figure | None:
    """Most groups that were hit at once: so many spare domains would have covered every failure."""
    bars = []
    for row in rows:
        band = row.get("peak_hit_groups")
        if band:
            note = f"{people(band['mean'])}  ({people(band['p5'])} to {people(band['p95'])})"
            bars.append(
                Bar(label=str(row["candidate"]), parts=(("groups hit at once", float(band["mean"])),), note=note)
            )
    if not bars or not any(value for bar in bars for _, value in bar.parts):
        return None
    if len({(bar.parts, bar.note) for bar in bars}) == 1:
        bars = [Bar(label="all strategies", parts=bars[0].parts, note=bars[0].note)]
    return Bars(
        key="spares",
        title="Groups hit at once, at worst",
        says="So many spare domains would have covered every failure; mean of draws, in brackets 5 to 95 %.",
        x_label="groups that lack a device",
        bars=tuple(bars),
        colors=(("groups hit at once", "orange"),),
    )


def _watts(rows: Sequence[Result]) -> Figure | None:
    lines = []
    for index, row in enumerate(rows):
        series = row.get("series")
        if series and row.get("mean_w"):
            x = tuple(float(time_s) / 86_400 for time_s in series["time_s"])
            y = tuple(float(watts) for watts in series["watts"])
            lines.append(Line(label=str(row["candidate"]), x=x, y=y, color=color_of(index), is_step=True))
    if not lines:
        return None
    return Lines(
        key="power",
        title="Draw of all devices",
        says="First draw of failures.",
        x_label="days",
        y_label="watts",
        lines=tuple(lines),
        unit="W",
        from_zero=False,
    )


def sweep_figures(data: Result) -> list[Figure]:
    """The figure of a result of `runflat sweep`, or of any result file with a `figure` of lines.

    Raises:
        LookupError, TypeError, ValueError: the file is not such a result.
    """
    figure = data["figure"]
    lines = []
    for index, row in enumerate(figure["lines"]):
        x = tuple(float(value) for value in row["x"])
        y = tuple(None if value is None else float(value) for value in row["y"])
        low = tuple(float(value) for value in row.get("low", ()))
        high = tuple(float(value) for value in row.get("high", ()))
        label = str(row["label"])
        lines.append(Line(label=label, x=x, y=y, low=low, high=high, color=color_of(index), has_dots=len(x) < 40))
    is_share = data.get("axis") is not None
    return [
        Lines(
            key=f"sweep-{data.get('axis') or data['name']}",
            title=str(figure["title"]),
            says="Mean over draws; the bands hold 5 to 95 % of them." if is_share else "",
            x_label=str(figure["x_label"]),
            y_label=str(figure["y_label"]),
            lines=tuple(lines),
            unit="%" if is_share else "",
            from_zero=False,
            x_log=bool(figure.get("x_log")) and all(x > 0 for line in lines for x in line.x),
        )
    ]


def advice_figures(data: Result) -> list[Figure]:
    """The options of a result of `runflat advise`, best first.

    Raises:
        LookupError, TypeError, ValueError: the file is not such a result.
    """
    bars = tuple(
        Bar(
            label=f"{row['chain']}, {row['spare_domains']} spare",
            parts=(("lost", float(row["lost_device_h_per_month"])),),
            note=f"{people(row['lost_device_h_per_month'], 'h')}; goodput {people(row['goodput'], '%')} "
            f"± {people(row['goodput_error'], '%')}",
        )
        for row in data["options"]
    )
    return [
        Bars(
            key="options",
            title="Device-hours lost a month",
            says="Every option that was tried, best first: hours that did not become committed tokens, spares counted.",
            x_label="device-hours a month",
            bars=bars,
            colors=(("lost", "orange"),),
        )
    ]
