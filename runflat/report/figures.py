"""Figures, drawn from result files alone: no number is typed in here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Results = Mapping[str, Any]
"""A result file as ``json`` decodes it."""


def _read(path: Path) -> Results:
    data: Results = json.loads(path.read_text(encoding="utf-8"))
    return data


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date inside, the same result gives the same file.
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=120, metadata=metadata)
    return path


def simulation_figures(result: Path, folder: Path) -> list[Path]:
    """Throughput over time with bands, and the breakdown of device-hours, of a result of ``runflat simulate``.

    Args:
        result: JSON file that ``simulate`` wrote.
        folder: Where the PNG files go.

    Returns:
        The files written.
    """
    data = _read(result)
    return [
        _throughput(data, folder / f"{data['name']}-throughput.png"),
        _breakdown(data, folder / f"{data['name']}-breakdown.png"),
        *([_power(data, folder / f"{data['name']}-power.png")] if any(r["mean_w"] for r in data["results"]) else []),
    ]


def _throughput(data: Results, path: Path) -> Path:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in data["results"]:
        low, mean, high = zip(*row["grid_throughput"], strict=True)
        (line,) = axes.plot(row["grid_days"], mean, label=row["candidate"], linewidth=1.4)
        axes.fill_between(row["grid_days"], low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(xlabel="days", ylabel="throughput over that of the healthy job", title=f"{data['name']}: mean and 5..95 %")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return _save(figure, path)


def _breakdown(data: Results, path: Path) -> Path:
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(data["results"])), layout="constrained")
    axes = figure.subplots()
    names = [row["candidate"] for row in data["results"]]
    categories = [name for name in data["results"][0]["ledger_device_h"] if name != "productive"]
    left = [0.0] * len(names)
    for category in categories:
        hours = [row["ledger_device_h"] for row in data["results"]]
        shares = [100 * entry[category] / sum(entry.values()) for entry in hours]
        if max(shares) < 0.005:
            continue
        axes.barh(names, shares, left=left, label=category)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set(xlabel="% of device-hours that were not productive", title=f"{data['name']}: where the time went")
    axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return _save(figure, path)


def _power(data: Results, path: Path) -> Path:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    for row in data["results"]:
        days = [time_s / 86_400 for time_s in row["series"]["time_s"]]
        axes.step(days, [watts / 1e6 for watts in row["series"]["watts"]], where="post", label=row["candidate"])
    axes.set(xlabel="days", ylabel="MW", title=f"{data['name']}: draw of all devices, first draw")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return _save(figure, path)


def trace_figure(result: Path, path: Path) -> Path:
    """Devices out at once over time, and repair times, of a result of ``runflat trace describe``."""
    data = _read(result)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.step(data["down_days"], [100 * share for share in data["down_share"]], where="post", linewidth=0.9)
    left.set(xlabel="days", ylabel="% of devices or nodes out of service", title=data["name"])
    hours = sorted(value for value in data["repair_h"] if value > 0)
    if hours:
        right.step(hours, [(index + 1) / len(hours) for index in range(len(hours))], where="post")
        right.set_xscale("log")
    right.set(xlabel="repair, hours", ylabel="share repaired by then")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return _save(figure, path)


def lines_figure(result: Path, path: Path) -> Path:
    """Lines of a result file with the keys ``title``, ``x_label``, ``y_label`` and ``lines``.

    Each line has ``label``, ``x``, ``y`` and may have ``low``, ``high`` (a band), ``style`` (of matplotlib)
    and ``like``, the label of an earlier line whose color it takes.
    """
    data = _read(result)["figure"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: Sequence[Results] = data["lines"]
    colors: dict[str, Any] = {}
    for line in lines:
        # What is drawn twice, as points and as a formula, has one color.
        color = colors.get(line.get("like", ""))
        style = line.get("style", "-")
        (drawn,) = axes.plot(line["x"], line["y"], style, label=line["label"], markersize=4, color=color)
        colors[line["label"]] = drawn.get_color()
        if "low" in line:
            axes.fill_between(line["x"], line["low"], line["high"], alpha=0.15, color=drawn.get_color(), linewidth=0)
    axes.set(title=data["title"], xlabel=data["x_label"], ylabel=data["y_label"])
    if data.get("x_log"):
        axes.set_xscale("log")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return _save(figure, path)
