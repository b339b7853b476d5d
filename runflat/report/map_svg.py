"""Draws one frame of the device map; the page's script turns it into any other frame by changing classes and words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from runflat.report.device_map import SMALL, STATES, DeviceMap, Look, at_frame, is_reduced
from runflat.report.svg import text_width


@dataclass(frozen=True)
class Sizes:
    """Pixels of cells and blocks."""

    cell_width: float
    cell_height: float
    gap: float
    head: float
    between: float


ROOMY = Sizes(74, 46, 5, 24, 18)
POWERED = Sizes(74, 60, 5, 24, 18)
"""Roomy cells with a third line, for power."""
DENSE = Sizes(9, 9, 1.5, 14, 10)


@dataclass(frozen=True)
class BlockBox:
    """Where a block is drawn."""

    x: float
    y: float
    width: float
    height: float
    per_row: int


def place_blocks(counts: Sequence[int], heads: Sequence[float], sizes: Sizes, width: float) -> list[BlockBox]:
    """Boxes of blocks with so many cells and heads so wide, in rows from left to right."""
    boxes: list[BlockBox] = []
    x = y = row_height = 0.0
    step_x, step_y = sizes.cell_width + sizes.gap, sizes.cell_height + sizes.gap
    for count, head in zip(counts, heads, strict=True):
        most = max(int((width + sizes.gap) // step_x), 1)
        per_row = min(max(math.ceil(math.sqrt(count * 1.6)), 1), most) if sizes is DENSE else min(count, most, 8)
        wide = max(per_row * step_x - sizes.gap, head)
        high = sizes.head + math.ceil(count / per_row) * step_y - sizes.gap
        if x and x + wide > width:
            x, y, row_height = 0.0, y + row_height + sizes.between, 0.0
        boxes.append(BlockBox(x, y, wide, high, per_row))
        x += wide + sizes.between
        row_height = max(row_height, high)
    return boxes


def draw_map(found: DeviceMap, number: int, width: int) -> str:
    """Frame `number` of the map as an SVG element."""
    looks, words = at_frame(found, number)
    sizes = DENSE if len(found.devices) > SMALL else POWERED if found.has_power else ROOMY
    size = 9 if sizes is DENSE else 12
    titles = [_title(name, text, sizes) for (name, _), text in zip(found.blocks, words, strict=True)]
    heads = [
        max(text_width(title, size), text_width(name + " TP 88/88", size)) + 2
        for title, (name, _) in zip(titles, found.blocks, strict=True)
    ]
    boxes = place_blocks([len(devices) for _, devices in found.blocks], heads, sizes, width - 4)
    height = max((box.y + box.height for box in boxes), default=0) + 6
    body = []
    cell = 0
    for index, ((_, devices), box) in enumerate(zip(found.blocks, boxes, strict=True)):
        css = "tiny" if sizes is DENSE else "lab"
        css += " head hit" if is_reduced(words[index]) else " head"
        y = box.y + sizes.head - (6 if sizes is DENSE else 8)
        head = f'<text x="{box.x + 2:.1f}" y="{y:.1f}" class="{css}" data-b="{index}">'
        body.append(f"{head}{escape(titles[index])}</text>")
        for slot, device in enumerate(devices):
            row, column = divmod(slot, box.per_row)
            x = box.x + 2 + column * (sizes.cell_width + sizes.gap)
            y = box.y + sizes.head + row * (sizes.cell_height + sizes.gap)
            body.append(_cell(cell, device, looks[cell], x, y, sizes))
            cell += 1
    missing = sum(look.state != "active" for look in looks)
    label = f"Device map: {len(looks)} devices, {missing} of them not training"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def _title(name: str, words: str, sizes: Sizes) -> str:
    if sizes is not DENSE:
        return f"{name} · {words}" if words else name
    return f"{name.replace('replica ', 'r')} {words.partition(' · ')[0].replace(' of ', '/')}".strip()


def _cell(index: int, device: str, look: Look, x: float, y: float, sizes: Sizes) -> str:
    letter = STATES.get(look.state, ("O", ""))[0]
    rect = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{sizes.cell_width:g}" height="{sizes.cell_height:g}" '
        f'rx="{1.5 if sizes is DENSE else 5}" class="cell m-{letter}" data-c="{index}"/>'
    )
    if sizes is DENSE:
        return rect
    middle = x + sizes.cell_width / 2
    power = (
        f'<text x="{middle:.1f}" y="{y + 51:.1f}" text-anchor="middle" class="tiny t-{letter}" data-p="{index}">'
        f"{escape(limit_words(look))}</text>"
    )
    return (
        f"{rect}{power if sizes is POWERED else ''}"
        f'<text x="{middle:.1f}" y="{y + 19:.1f}" text-anchor="middle" class="id t-{letter}" data-c="{index}">'
        f"{escape(device)}</text>"
        f'<text x="{middle:.1f}" y="{y + 36:.1f}" text-anchor="middle" class="tiny t-{letter}" data-u="{index}">'
        f"{escape(cell_words(look))}</text>"
    )


def limit_words(look: Look) -> str:
    """What stands in a cell of its power: the limit."""
    return look.power.partition(" limit")[0]


def cell_words(look: Look) -> str:
    """What stands in a cell under the device's name: its units of the first kind, or its state."""
    if look.state != "active":
        return look.state
    return look.units.partition(",")[0] or look.state
