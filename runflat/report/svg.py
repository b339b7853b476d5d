"""Draws a figure as SVG, once for a wide and once for a narrow page. Colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from runflat.report.chart import (
    Bars,
    Fall,
    Figure,
    Line,
    Lines,
    Mark,
    Waterfall,
    decimate,
    log_ticks,
    people,
    ticks,
)

WIDE, NARROW = 860, 350
"""Widths in pixels; text has the same size in both."""
LETTER = 6.5
"""Mean width of a letter of 12 pixels."""
POINTS = 900
"""Most points of a line that are drawn."""


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is, in pixels."""
    return len(text) * LETTER * size / 12


def draw(figure: Figure, width: int = WIDE) -> str:
    """The figure as an SVG element."""
    if isinstance(figure, Lines):
        return _lines(figure, width)
    if isinstance(figure, Bars):
        return _bars(figure, width)
    return _waterfall(figure, width)


@dataclass(frozen=True)
class Box:
    """The plotting area, and the numbers at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x0: float
    x1: float
    y0: float
    y1: float
    x_log: bool = False
    y_log: bool = False

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + (self.right - self.left) * _part(value, self.x0, self.x1, self.x_log)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.bottom - (self.bottom - self.top) * _part(value, self.y0, self.y1, self.y_log)


def _part(value: float, low: float, high: float, is_log: bool) -> float:
    if is_log:
        value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
    return (value - low) / (high - low) if high > low else 0.5


def _svg(width: float, height: float, title: str, says: str, body: Iterable[str], extra: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}. {escape(says)}"{extra}>'
        + "".join(body)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{css}"/>'


def legend(
    entries: Sequence[tuple[str, str, bool]], left: float, top: float, right: float, stroke: int = 3
) -> tuple[str, float]:
    """(SVG of (label, colour, is dashed) entries in rows from `top`, height used)."""
    x, y, body = left, top + 9, ""
    for label, color, dashed in entries:
        wide = 26 + text_width(label) + 10
        if x > left and x + wide > right:
            x, y = left, y + 18
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        body += f'<path d="M{x:.1f} {y - 4:.1f}h18" class="line s-{color}"{dash} style="stroke-width:{stroke}"/>'
        body += _text(x + 24, y, label, "lab")
        x += wide
    return body, y - top + 12


def _ends(figure: Lines) -> tuple[float, float, float, float]:
    """(least x, greatest x, least y, greatest y) of all lines."""
    xs = [value for line in figure.lines for value in line.x] + [mark.x for mark in figure.marks]
    ys = [y for line in figure.lines for y in (*line.y, *line.low, *line.high) if y is not None]
    if figure.y_log:
        ys = [y for y in ys if y > 0]
    if not xs or not ys:
        return 0.0, 1.0, 0.1, 1.0
    low, high = min(ys), max(ys)
    if figure.y_log:
        return min(xs), max(xs), low / 1.2, high * 1.2
    low = min(low, 0.0) if figure.from_zero else low
    high = max(high, 1.0) if figure.to_one else high
    margin = (high - low or abs(high) or 1.0) * 0.06
    return min(xs), max(xs), low - (0 if figure.from_zero and low == 0 else margin), high + margin


def _lines(figure: Lines, width: int) -> str:
    height = 300 if width > 500 else 260
    x0, x1, y0, y1 = _ends(figure)
    y_values = log_ticks(y0, y1) if figure.y_log else ticks(y0, y1, 5)
    labels = [people(value, figure.unit) for value in y_values]
    left = 14 + max(text_width(label) for label in labels)
    entries = [(line.label, line.color, line.is_dashed) for line in figure.lines]
    label_width = text_width(figure.y_label) + 24
    head, used = legend(entries, label_width, 2, width - 6) if len(entries) > 1 else ("", 14.0)
    marks_height = 18 if figure.marks else 6
    box = Box(left, used + marks_height + 2, width - 12, height - 38, x0, x1, y0, y1, figure.x_log, figure.y_log)
    body = [head, _axes(figure, box, y_values, labels, width)]
    for line in figure.lines:
        body.append(_band(line, box))
    body += [_mark(mark, box) for mark in _spread(figure.marks, box)]
    body += [_curve(line, box) for line in figure.lines]
    body.append(_text(2, 11, figure.y_label, "mut"))
    extra = (
        f' data-box="{box.left:.1f} {box.top:.1f} {box.right:.1f} {box.bottom:.1f}" data-x="{x0!r} {x1!r}" '
        f'data-y="{y0!r} {y1!r}" data-log="{int(figure.x_log)} {int(figure.y_log)}" data-unit="{escape(figure.unit)}"'
    )
    return _svg(width, height, figure.title, figure.says, body, extra)


def _axes(figure: Lines, box: Box, y_values: Sequence[float], labels: Sequence[str], width: int) -> str:
    body = ""
    for value, label in zip(y_values, labels, strict=True):
        y = box.y(value)
        body += _rule(box.left, y, box.right, y, "grid") + _text(box.left - 6, y + 4, label, "num", "end")
    count = 8 if width > 500 else 4
    values = log_ticks(box.x0, box.x1) if figure.x_log else ticks(box.x0, box.x1, count)
    for value in values:
        x = box.x(value)
        body += _rule(x, box.bottom, x, box.bottom + 4, "axis")
        body += _text(min(x, box.right - 4), box.bottom + 17, people(value), "num", "middle")
    body += _rule(box.left, box.bottom, box.right, box.bottom, "axis")
    return body + _text(box.right, box.bottom + 32, figure.x_label, "mut", "end")


def _spread(marks: Sequence[Mark], box: Box) -> list[Mark]:
    """The marks, thinned out where more than one falls on the same three pixels."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda one: one.x):
        if not kept or box.x(mark.x) - box.x(kept[-1].x) >= 3:
            kept.append(mark)
    return kept


def _mark(mark: Mark, box: Box) -> str:
    x = box.x(mark.x)
    return (
        f'<g class="mark"><title>{escape(mark.label)}</title>'
        + _rule(x, box.top - 3, x, box.bottom, f"tick s-{mark.color}")
        + f'<text x="{x:.1f}" y="{box.top - 6:.1f}" text-anchor="middle" class="sign f-{mark.color}">'
        + f"{escape(mark.sign)}</text></g>"
    )


def _points(line: Line, y: Sequence[float | None], box: Box) -> list[list[tuple[float, float]]]:
    """Stretches of pixels without a gap."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for index in decimate(line.x, y, POINTS):
        value = y[index]
        if value is None or (box.y_log and value <= 0):
            if stretches[-1]:
                stretches.append([])
            continue
        stretches[-1].append((box.x(line.x[index]), box.y(value)))
    return [stretch for stretch in stretches if stretch]


def _path(points: Sequence[tuple[float, float]], is_step: bool) -> str:
    first, *rest = points
    out = f"M{first[0]:.1f} {first[1]:.1f}"
    for x, y in rest:
        out += f"H{x:.1f}V{y:.1f}" if is_step else f"L{x:.1f} {y:.1f}"
    return out


def _curve(line: Line, box: Box) -> str:
    stretches = _points(line, line.y, box)
    d = "".join(_path(points, line.is_step) for points in stretches if len(points) > 1)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    body = f'<path d="{d}" class="line s-{line.color}"{dash}/>' if d else ""
    dots = [point for points in stretches for point in points if line.has_dots or len(points) == 1]
    return body + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" class="f-{line.color}"/>' for x, y in dots)


def _band(line: Line, box: Box) -> str:
    if not line.low:
        return ""
    kept = decimate(line.x, line.y, POINTS)
    upper = [(box.x(line.x[index]), box.y(line.high[index])) for index in kept]
    lower = [(box.x(line.x[index]), box.y(line.low[index])) for index in reversed(kept)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *lower))
    return f'<polygon points="{points}" class="band f-{line.color}"/>'


def _bars(figure: Bars, width: int) -> str:
    shown = figure.bars[: len(figure.bars) - figure.num_left_out]
    narrow = width < 500
    label_width = 0.0 if narrow else min(max((text_width(bar.label) for bar in shown), default=0) + 10, 260)
    note_width = 0.0 if narrow else min(max((text_width(bar.note) for bar in shown), default=0) + 8, 330)
    row = 42 if narrow else 26
    used_names = {name for bar in shown for name, value in bar.parts if value > 0}
    entries = [(name, color, False) for name, color in figure.colors if name in used_names]
    head, used = legend(entries, 2 if narrow else label_width, 2, width - 6, 9) if len(entries) > 1 else ("", 0.0)
    greatest = max((sum(value for _, value in bar.parts) for bar in shown), default=0.0) or 1.0
    top, left, right = used + 8, label_width, width - note_width - 8
    box = Box(left, top, right, top + row * len(shown), 0.0, greatest, 0.0, 1.0)
    body = [head]
    for value in ticks(0.0, greatest, 3 if narrow else 6):
        x = box.x(value)
        body.append(_rule(x, top, x, box.bottom + 3, "grid"))
        anchor = "end" if narrow and x > right - 20 else "middle" if x > 12 else "start"
        body.append(_text(x, box.bottom + 17, people(value, figure.unit), "num", anchor))
    colors = dict(figure.colors)
    for index, bar in enumerate(shown):
        y = top + index * row
        start = 0.0
        if narrow:
            room = width - text_width(bar.label) - 14
            note = bar.note if text_width(bar.note) <= room else bar.note.partition(";")[0].partition("  ")[0]
            body.append(_text(2, y + 12, bar.label, "lab") + _text(width - 2, y + 12, _cut(note, room), "mut", "end"))
        else:
            body.append(_text(left - 8, y + 17, _cut(bar.label, label_width), "lab", "end"))
        y_bar = y + (18 if narrow else 5)
        for name, value in bar.parts:
            if value > 0:
                x1, x2 = box.x(start), box.x(start + value)
                body.append(
                    f'<rect x="{x1:.2f}" y="{y_bar:.1f}" width="{max(x2 - x1, 0.6):.2f}" height="17" '
                    f'class="bar f-{colors[name]}"><title>{escape(bar.label)}: {escape(name)} '
                    f"{escape(people(value, figure.unit))}</title></rect>"
                )
                start += value
        if not narrow:
            body.append(_text(box.x(start) + 8, y + 18, bar.note, "mut"))
    body.append(_text(right, box.bottom + 33, figure.x_label, "mut", "end"))
    return _svg(width, box.bottom + 40, figure.title, figure.says, body)


def _cut(text: str, width: float) -> str:
    most = int(width / LETTER)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _waterfall(figure: Waterfall, width: int) -> str:
    return _columns(figure, width) if width > 500 else _rows(figure, width)


def _columns(figure: Waterfall, width: int) -> str:
    height, left = 330, 52.0
    lows = [fall.share for fall in figure.falls if fall.kind == "rest"]
    floor = _floor(min(lows, default=0.0))
    box = Box(left, 34, width - 8, height - 50, 0, len(figure.falls), floor, 1.0)
    body = []
    for value in ticks(floor, 1.0, 5):
        y = box.y(value)
        body.append(_rule(left, y, box.right, y, "grid") + _text(left - 6, y + 4, people(value, "%"), "num", "end"))
    gap = (box.right - box.left) / len(figure.falls)
    for index, (fall, start) in enumerate(_levels(figure)):
        x, wide = box.left + gap * index + gap * 0.12, gap * 0.76
        y1, y2 = box.y(start), box.y(max(start - fall.share, floor) if fall.kind == "loss" else floor)
        body.append(_fall(fall.label, fall.share, fall.color, x, y1, wide, max(y2 - y1, 1.0)))
        body.append(_text(x + wide / 2, y1 - 6, people(fall.share, "%"), "num strong", "middle"))
        for row, word in enumerate(_two_lines(fall.label, gap - 6)):
            body.append(_text(x + wide / 2, box.bottom + 18 + 14 * row, word, "lab", "middle"))
        if fall.kind == "loss" and index + 1 < len(figure.falls):
            body.append(_rule(x, y2, x + gap + wide * 0.3, y2, "join"))
    body.append(_rule(left, box.bottom, box.right, box.bottom, "axis"))
    if floor > 0:
        body.append(_text(2, 11, f"the axis begins at {people(floor, '%')}", "mut"))
    return _svg(width, height, figure.title, figure.says, body)


def _rows(figure: Waterfall, width: int) -> str:
    floor = _floor(min((fall.share for fall in figure.falls if fall.kind == "rest"), default=0.0))
    row, top = 36, 4
    box = Box(4, top, width - 4, top + row * len(figure.falls), floor, 1.0, 0, 1)
    body = []
    for index, (fall, start) in enumerate(_levels(figure)):
        y = top + index * row
        end = max(start - fall.share, floor) if fall.kind == "loss" else floor
        body.append(_text(4, y + 12, f"{fall.label}", "lab"))
        body.append(_text(width - 4, y + 12, people(fall.share, "%"), "num strong", "end"))
        body.append(
            _fall(fall.label, fall.share, fall.color, box.x(end), y + 17, max(box.x(start) - box.x(end), 1.0), 13)
        )
    note = f"the axis begins at {people(floor, '%')}" if floor > 0 else ""
    body.append(_text(4, box.bottom + 14, note, "mut"))
    return _svg(width, box.bottom + 20, figure.title, figure.says, body)


def _fall(label: str, share: float, color: str, x: float, y: float, wide: float, high: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" class="bar f-{color}">'
        f"<title>{escape(label)}: {escape(people(share, '%'))}</title></rect>"
    )


def _floor(least: float) -> float:
    """Where the axis of a waterfall begins: 0, or a round share when everything happens far above."""
    return 0.0 if least < 0.5 else math.floor((least - (1 - least) * 0.5) * 20) / 20


def _levels(figure: Waterfall) -> Iterator[tuple[Fall, float]]:
    """(bar, share at which its upper end is)."""
    level = 1.0
    for fall in figure.falls:
        if fall.kind != "loss":
            level = fall.share
        yield fall, level
        if fall.kind == "loss":
            level -= fall.share


def _two_lines(label: str, width: float) -> list[str]:
    lines = [""]
    for word in label.split():
        if lines[-1] and text_width(f"{lines[-1]} {word}") > width and len(lines) < 3:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return [_cut(line, width + 4) for line in lines]
