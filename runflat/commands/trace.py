"""`runflat trace describe FILE`: rates, repair times and concurrency of a failure trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from runflat.commands.simulate import write_json
from runflat.errors import ConfigError
from runflat.traces.describe import describe, down_steps, facts_table
from runflat.traces.generate import HOUR_S
from runflat.traces.readers import TraceFormat, read_trace
from runflat.traces.trace import DAY_S

DESCRIPTION = """What a failure trace says.

Example: runflat trace describe fault_trace.json --num-devices 400
"""


def trace_describe_command(
    file: Annotated[Path, tyro.conf.Positional],
    trace_format: Annotated[TraceFormat, tyro.conf.arg(name="format")] = "auto",
    num_devices: int | None = None,
    json_out: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    figures: Path | None = Path("runs/trace"),
) -> None:
    """Print rates, repair quantiles, concurrency and causes, and write a result file and a figure.

    Args:
        file: Trace: InfiniteHBD-Trace JSON, spot list, our CSV, or events (JSON list or lines).
        trace_format: Format, where it cannot be told from the file.
        num_devices: Devices or nodes that were watched, where the file names only those that failed.
        json_out: Where the result file goes; none: beside the figure.
        figures: Folder of the figure; None for no figure.
    """
    trace = read_trace(file, trace_format, num_devices=num_devices)
    if not len(trace):
        raise ConfigError(f"{file} has no failure in it, so there is nothing to describe")
    facts = describe(trace)
    print(facts_table(facts))
    out = json_out or (figures / f"{file.stem}.json" if figures else None)
    if out is None:
        return
    times_s, down = down_steps(trace)
    data = {
        "name": file.name,
        **facts.to_json(),
        "down_days": (times_s / DAY_S).tolist(),
        "down_share": (down / trace.num_devices).tolist(),
        "repair_h": [value / HOUR_S for value in trace.duration_s.tolist() if math.isfinite(value)],
    }
    write_json(out, data)
    written = [out]
    if figures is not None:
        from runflat.report.figures import trace_figure  # matplotlib loads slowly: the numbers come first

        written.append(trace_figure(out, figures / f"{file.stem}.png"))
    print("\nwritten: " + ", ".join(str(path) for path in written))


def main(argv: Sequence[str]) -> int:
    """Exit status of `runflat trace` with these arguments.

    Raises:
        ConfigError: for anything but `describe`.
    """
    if not argv or argv[0] != "describe":
        raise ConfigError("say what to do with the trace: runflat trace describe FILE (--help shows the flags)")
    tyro.cli(trace_describe_command, args=list(argv[1:]), prog="runflat trace describe", description=DESCRIPTION)
    return 0
