"""What every benchmark says of itself: the machine, the versions, the command; its result as JSON and as a page."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """CPU model, cores, memory in GB, and versions."""
    fields: dict[str, str] = {}
    for name in ("/proc/cpuinfo", "/proc/meminfo"):
        for line in Path(name).read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    versions = {name: version(name) for name in PACKAGES}
    return {
        "cpu": fields.get("model name", "unknown"),
        "cores": os.cpu_count(),
        "memory_gb": round(int(fields["MemTotal"].split()[0]) / 1e6, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Number, least, median, 95th percentile and largest of some seconds (or other values)."""
    ordered = sorted(values)
    return {
        "num": len(ordered),
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }


def report(folder: Path, title: str, text: str, rows: Sequence[tuple[str, str, str]], data: Mapping[str, Any]) -> None:
    """Write result.json and README.md beside a benchmark. `rows` are (what, measured, wanted)."""
    facts = machine()
    command = f"python benchmarks/{folder.name}/run.py {' '.join(sys.argv[1:])}".strip()
    whole = {"command": command, "load_average": os.getloadavg(), "machine": facts, **data}
    (folder / "result.json").write_text(json.dumps(whole, indent=2) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    table = "\n".join(f"| {what} | {measured} | {wanted} |" for what, measured, wanted in rows)
    page = (
        f"# {title}\n\n{text}\n\n| | measured | wanted |\n|---|---|---|\n{table}\n\n"
        f"`{command}` on {facts['cores']} cores of {facts['cpu']}, {facts['memory_gb']:.0f} GB, {versions}. All "
        f"numbers are in `result.json`.\n"
    )
    (folder / "README.md").write_text(page)
    print(page)
