"""`runflat power`: what a boost can and cannot do on this machine (`probe`), and how fast power makes a job."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import tyro
from rich.console import Console

from runflat.commands.power_calibrate import calibrate
from runflat.errors import ConfigError
from runflat.power.nvml import NvmlDevices
from runflat.power.probe import Probed, probe, summary

PROBE = """What power boost can and cannot do on this machine. Reads only; needs no rights.

Example: runflat power probe --json
"""


@dataclass(frozen=True)
class ProbeArgs:
    """How to say it."""

    json: bool = False
    """As one JSON object, in watts and degrees Celsius."""


def main(argv: list[str]) -> int:
    """Exit status of `runflat power` with these arguments.

    Raises:
        ConfigError: for anything but `probe` and `calibrate`.
    """
    if argv and argv[0] == "calibrate":
        return calibrate(argv[1:])
    if not argv or argv[0] != "probe":
        raise ConfigError(
            "say what to do about power: runflat power probe, or runflat power calibrate (--help shows the flags)"
        )
    args = tyro.cli(ProbeArgs, args=argv[1:], prog="runflat power probe", description=PROBE)
    found = probe(NvmlDevices())
    if args.json:
        print(json.dumps({"devices": [_record(device) for device in found], "summary": summary(found)}, indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for device in found:
        for line in _lines(device):
            console.print(line, markup=False)
        console.print()
    console.print(summary(found), markup=False)
    return 0


def _record(device: Probed) -> dict[str, object]:
    reading = device.reading
    seen: dict[str, object] = {}
    if reading is not None:
        seen = dataclasses.asdict(dataclasses.replace(reading, reasons=None))
        seen["reasons"] = None if reading.reasons is None else sorted(reading.reasons)
    facts = dataclasses.asdict(device.facts)
    return facts | seen | {"headroom_w": device.headroom_w, "verdict": device.verdict(), "error": device.error}


def _lines(device: Probed) -> list[str]:
    facts, reading = device.facts, device.reading
    lines = [f"{facts.index}  {facts.name}  {facts.uuid}"]
    lines.append(f"   range {facts.min_w:g} to {facts.max_w:g} W, default {facts.default_w:g} W")
    if reading is not None:
        draw = "" if reading.draw_w is None else f", draws {reading.draw_w:g} W"
        lines.append(
            f"   limit {reading.limit_w:g} W, in force {reading.enforced_w:g} W{draw}, headroom {device.headroom_w:g} W"
        )
        heat = "" if reading.temperature_c is None else f"{reading.temperature_c:g} C"
        margin = "" if reading.margin_c is None else f", {reading.margin_c:g} C below its thermal limit"
        if heat:
            lines.append(f"   {heat}{margin}")
        lines.append(f"   held back by: {device.limiters()}")
    lines.append(f"   {device.verdict()}.")
    return lines
