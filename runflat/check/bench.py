"""What every benchmark says of itself: the machine, the versions, the command; its result as JSON and as a page."""

from __future__ import annotations

import argparse
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


def arguments(text: str, folder: Path) -> argparse.ArgumentParser:
    """A parser of a benchmark's flags with those that all have: `--quick` (a few minutes), and `--out`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; no result to keep")
    parser.add_argument("--out", type=Path, default=folder, help="folder of result.json and README.md")
    return parser


def report(
    out: Path,
    title: str,
    text: str,
    rows: Sequence[tuple[str, ...]],
    data: Mapping[str, Any],
    *,
    header: Sequence[str] = ("", "measured", "wanted"),
    versions: Mapping[str, str] | None = None,
) -> None:
    """Write result.json and README.md into `out`; `header` names the columns, `versions` more packages."""
    facts = machine()
    facts["versions"] |= versions or {}
    script = Path(sys.argv[0])
    command = f"python benchmarks/{script.parent.name}/{script.name} {' '.join(sys.argv[1:])}".strip()
    out.mkdir(parents=True, exist_ok=True)
    whole = {"command": command, "load_average": os.getloadavg(), "machine": facts, **data}
    (out / "result.json").write_text(json.dumps(whole, indent=2) + "\n")
    named = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    table = "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
    page = (
        f"# {title}\n\n{text}\n\n{table}\n\n"
        f"`{command}` on {facts['cores']} cores of {facts['cpu']}, {facts['memory_gb']:.0f} GB, {named}. All "
        f"numbers are in `result.json`.\n"
    )
    (out / "README.md").write_text(page)
    print(page)
