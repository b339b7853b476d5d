"""Draws a figure as PNG with matplotlib: the same data as the SVG, for places that take no SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from runflat.report.chart import Bars, Figure, Lines, Waterfall, people
from runflat.report.palette import COLORS


def color(name: str) -> str:
    """The light variant of a colour."""
    return COLORS[name][0]


def save_png(figure: Figure, path: Path, credit: str) -> None:
    """Write the figure to `path`, with `credit` (where it comes from) below it."""
    rows = len(figure.bars) - figure.num_left_out if isinstance(figure, Bars) else 8
    canvas = Canvas(figsize=(9, max(1.8 + 0.35 * rows, 3) if isinstance(figure, Bars) else 4.6), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(figure.title, loc="left", fontweight="bold")
    if isinstance(figure, Lines):
        _lines(figure, axes)
    elif isinstance(figure, Bars):
        _bars(figure, axes)
    else:
        _waterfall(figure, axes)
    canvas.supxlabel(_plain(credit[:180]), fontsize=6.5, color=color("muted"))
    # Without a version inside, the same numbers give the same file.
    canvas.savefig(path, dpi=130, metadata={"Software": None})


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def _formatter(unit: str) -> Any:
    return FuncFormatter(lambda value, _: people(value, unit))


def _lines(figure: Lines, axes: Axes) -> None:
    for line in figure.lines:
        y = [float("nan") if value is None else value for value in line.y]
        style = "--" if line.is_dashed else "-"
        axes.plot(
            line.x,
            y,
            style,
            label=_plain(line.label),
            color=color(line.color),
            linewidth=1.6,
            drawstyle="steps-post" if line.is_step else "default",
            marker="o" if line.has_dots else None,
            markersize=3.5,
        )
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=color(line.color), alpha=0.16, linewidth=0)
    for mark in figure.marks:
        axes.axvline(mark.x, color=color(mark.color), linewidth=0.8, linestyle=":")
    if figure.x_log:
        axes.set_xscale("log")
    if figure.y_log:
        axes.set_yscale("log")
    elif figure.from_zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_formatter(figure.unit))
    axes.set(xlabel=_plain(figure.x_label), ylabel=_plain(figure.y_label))
    axes.grid(alpha=0.3)
    if len(figure.lines) > 1:
        axes.legend(fontsize="small", frameon=False)


def _bars(figure: Bars, axes: Axes) -> None:
    shown = figure.bars[: len(figure.bars) - figure.num_left_out]
    left = [0.0] * len(shown)
    places = list(range(len(shown)))
    for name, hue in figure.colors:
        values = [dict(bar.parts).get(name, 0.0) for bar in shown]
        if any(values):
            axes.barh(places, values, left=left, label=name, color=color(hue), height=0.65)
            left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(places, [_plain(bar.label) for bar in shown])
    for place, (bar, end) in enumerate(zip(shown, left, strict=True)):
        axes.annotate(_plain(bar.note), (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_xlabel(_plain(figure.x_label))
    axes.xaxis.set_major_formatter(_formatter(figure.unit))
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize="small", frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _waterfall(figure: Waterfall, axes: Axes) -> None:
    level = 1.0
    for index, fall in enumerate(figure.falls):
        if fall.kind != "loss":
            level = fall.share
        bottom = level - fall.share if fall.kind == "loss" else 0.0
        axes.bar(index, fall.share, bottom=bottom, color=color(fall.color), width=0.75)
        axes.annotate(
            people(fall.share, "%"), (index, level), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
        if fall.kind == "loss":
            level = bottom
    axes.set_xticks(
        range(len(figure.falls)), [fall.label for fall in figure.falls], rotation=25, ha="right", fontsize=8
    )
    least = min((fall.share for fall in figure.falls if fall.kind == "rest"), default=0.0)
    axes.set_ylim(max(least - (1 - least) * 0.5, 0.0) if least >= 0.5 else 0.0, 1.03)
    axes.yaxis.set_major_formatter(_formatter("%"))
