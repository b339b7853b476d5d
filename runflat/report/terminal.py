"""A running job in a terminal: what the screen shows, and what the keys mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.text import Text

from runflat.report.chart import people
from runflat.report.records import PlanView
from runflat.report.run_files import RunData
from runflat.report.views import ACTION_WORDS, duration

SIGNS = {
    "active": ("■", "green"),
    "draining": ("d", "yellow"),
    "standby": ("s", "yellow"),
    "starting": ("s", "yellow"),
    "parked": ("p", "blue"),
    "lost": ("x", "bold red"),
    "out": ("X", "bold red"),
}
"""State of a device -> (its sign, its style); the sign alone says it where there are no colours."""
LEGEND = "■ trains  d leaves  s starts or waits  p no work  x lost  X out"


Watts = tuple[float, float | None]
"""(limit, draw) of a device."""
Wish = Literal["drain", "return"]
"""What may be asked of a device from here."""


@dataclass(frozen=True)
class Keys:
    """What has been typed: nothing (`watch`), a device's name (`name`), or a wish that waits for its yes (`sure`)."""

    mode: str = "watch"
    action: Wish = "drain"
    device: str = ""

    @property
    def prompt(self) -> str:
        """The last line of the screen."""
        if self.mode == "name":
            return f"{self.action} which device? {self.device}_   (Enter; Esc to leave it)"
        if self.mode == "sure":
            return f"really {self.action} {self.device}? (y/n)"
        return "d drain a device   r return a device   q quit"


def press(keys: Keys, key: str) -> tuple[Keys, tuple[Wish, str] | None, bool]:
    """(keys afterwards, (action, device) that was confirmed, whether to quit) after one key."""
    if keys.mode == "watch":
        if key in ("d", "r"):
            return Keys("name", "drain" if key == "d" else "return"), None, False
        return keys, None, key == "q"
    if key == "\x1b" or (keys.mode == "sure" and key != "y"):
        return Keys(), None, False
    if keys.mode == "sure":
        return Keys(), (keys.action, keys.device), False
    if key in ("\r", "\n"):
        return (replace(keys, mode="sure") if keys.device else Keys()), None, False
    if key in ("\x7f", "\b"):
        return replace(keys, device=keys.device[:-1]), None, False
    return (replace(keys, device=keys.device + key) if key.isalnum() or key == ":" else keys), None, False


def screen(data: RunData, state: str, last_line: str, width: int, height: int) -> Text:
    """The screen: at most `height` lines of at most `width` cells."""
    head = [_head(data, state, width), _numbers(data), Text(str(data.devices.get("waiting") or ""), style="yellow")]
    room = height - len(head) - 2  # an empty line, and the last one
    incidents = _incidents(data)
    most = max(room - min(len(incidents), 4) - 2, 3)
    lines = [*head, *device_lines(data, width, most), Text(LEGEND, style="dim"), *incidents]
    lines = lines[: height - 1]
    lines.append(Text(last_line, style="bold"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _head(data: RunData, state: str, width: int) -> Text:
    step = data.devices.get("step")
    total = data.total_steps
    line = Text(data.name, style="bold").append(f"  {state}", style="cyan")
    if isinstance(step, int):
        line.append(f"  step {step}" + (f"/{total}" if total else ""))
        if total:
            cells = max(min(width - line.cell_len - 8, 30), 5)
            done = min(max(step * cells // total, 0), cells)
            line.append("  " + "█" * done, style="green").append("░" * (cells - done), style="dim")
            line.append(f" {100 * step // total} %")
    return line


def _numbers(data: RunData) -> Text:
    words = []
    last = data.steps[-1] if data.steps else None
    if last and last.tokens_per_s is not None:
        words.append(f"{people(last.tokens_per_s)} tokens/s")
    if last and last.loss is not None:
        words.append(f"loss {last.loss:.4f}")
    if data.goodput is not None:
        words.append(f"goodput {100 * data.goodput:.1f} %")
    words.append(f"{len(data.incidents)} incidents")
    words.append(f"{duration(data.wall_s)} since the start")
    if data.emulated:
        words.append("emulated devices")
    return Text("   ".join(words))


def device_lines(data: RunData, width: int, most: int) -> list[Text]:
    """The device map: a line for each replica; where there are too many, whole replicas are counted only."""
    plan = _plan(data)
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in data.device_rows:
        name = str(row.get("device"))
        replica, colon, _ = name.partition(":")
        groups.setdefault(replica if colon else "spares", []).append((name, str(row.get("state"))))
    newest = data.steps[-1].power if data.steps else None
    power = {device: (limit_w, draw_w) for device, limit_w, draw_w in newest.devices} if newest else {}
    lines = [
        (_line(name, rows, plan, width, power), all(state == "active" for _, state in rows))
        for name, rows in groups.items()
    ]
    if len(lines) <= most:
        return [line for line, _ in lines]
    hurt = [line for line, whole in lines if not whole][: most - 1]
    return [*hurt, Text(f"and {len(lines) - len(hurt)} more, {sum(whole for _, whole in lines)} of them whole")]


def _plan(data: RunData) -> PlanView | None:
    generation = data.devices.get("generation")
    return data.plans.get(generation) if isinstance(generation, int) else None


def _line(
    name: str, rows: Sequence[tuple[str, str]], plan: PlanView | None, width: int, power: Mapping[str, Watts]
) -> Text:
    head = "spares" if name == "spares" else f"replica {name}"
    found = next((one for one in plan.replicas if str(one.replica) == name), None) if plan else None
    degree = f"TP {found.degree}/{plan.tp_full}" if found and plan else ""
    line = Text(f"{head:<12} {degree:<9} ")
    if found and plan and found.degree < plan.tp_full:
        line.stylize("bold red", 13, 13 + len(degree))
    gap = " " if len(rows) <= 16 else ""
    for _, state in rows:
        sign, style = SIGNS.get(state, ("?", ""))
        line.append(sign + gap, style=style)
    missing = [device for device, state in rows if state not in ("active", "draining")]
    if missing:
        line.append("  " + ", ".join(f"{device} {dict(rows)[device]}" for device in missing[:3]))
    return line.append(_watts([power.get(device) for device, _ in rows], width - line.cell_len))


def _watts(power: Sequence[Watts | None], room: int) -> str:
    """Limit and draw of each device, in watts, or of all together where there is no room; empty if none is known."""
    known = [pair for pair in power if pair is not None]
    if not known:
        return ""
    each = " ".join("-" if pair is None else "/".join("?" if w is None else f"{w:.0f}" for w in pair) for pair in power)
    limits_w, draws_w = zip(*known, strict=True)
    low, high = min(limits_w), max(limits_w)
    span = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
    drawn = [draw_w for draw_w in draws_w if draw_w is not None]
    whole = f"limits {span} W" + (f", {sum(drawn):.0f} W drawn" if drawn else "")
    return next((words for words in (f"  W: {each}", f"  {whole}") if len(words) <= room), "")


def _incidents(data: RunData) -> list[Text]:
    lines = []
    for row in reversed(data.incidents[-8:]):
        who = " and ".join(row.devices) or "links"
        what = ACTION_WORDS.get(row.action, row.action)
        words = f"▼ {row.started_s:,.1f} s  {who}: {row.cause}; stood {row.stopped_s:.2f} s, {what}"
        lines.append(Text(words, style="red" if row is data.incidents[-1] else ""))
    return lines
