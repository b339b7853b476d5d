"""What stands on a page about one run or one result: numbers up front, figures, the device map, tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runflat.errors import DataError
from runflat.report.chart import Figure, people
from runflat.report.device_map import DeviceMap, device_map
from runflat.report.records import IncidentRow
from runflat.report.run_figures import run_figures
from runflat.report.run_files import RunData
from runflat.report.sim_figures import advice_figures, simulation_figures, sweep_figures

ACTION_WORDS = {
    "discard": "the step ran again",
    "forward": "no step was repeated",
    "memory": "went back to copies in memory",
    "checkpoint": "went back to the checkpoint",
    "start": "the run started again",
}
"""What became of the step in flight, by the word of events.jsonl."""


LARGEST = 1e100
"""Numbers of result files beyond this are damage."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number up front: what it is, its value, a few more words."""

    what: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people."""

    title: str
    says: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown of one run or result."""

    key: str
    """Prefix of ids and file names: letters, digits and hyphens."""
    name: str
    subtitle: str
    source: str
    """From which run, command and version it comes."""
    is_emulated: bool = False
    tiles: tuple[Tile, ...] = ()
    problems: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    num_before_map: int = 0
    map: DeviceMap | None = None
    tables: tuple[Table, ...] = ()


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def source_of(what: str, origin: Mapping[str, Any]) -> str:
    """From which file or folder, command and version something comes; what was not recorded is not said."""
    words = [f"from {what}"]
    command, version, started = origin.get("command"), origin.get("version"), origin.get("started")
    if isinstance(command, list):
        words.append(" ".join(map(str, command)))
    if isinstance(version, str):
        words.append(f"runflat {version}")
    if isinstance(started, str):
        words.append(started)
    return " · ".join(words)


def run_view(data: RunData, key: str, whole: RunData | None = None, *, has_map: bool = True) -> View:
    """A run, finished or running; `whole` is a run without a failure to compare its loss with."""
    figures = run_figures(data, whole)
    tables = [_incident_table(data.incidents)] if data.incidents else []
    return View(
        key=key,
        name=data.name,
        subtitle=_run_subtitle(data),
        source=source_of(str(data.folder), data.origin),
        is_emulated=data.emulated,
        tiles=run_tiles(data),
        problems=(*_emulation_problem(data), *data.problems),
        figures=tuple(figures),
        num_before_map=min(2, len(figures)),
        map=device_map(data) if has_map else None,
        tables=tuple(tables),
    )


def _emulation_problem(data: RunData) -> tuple[str, ...]:
    emulated = data.summary.get("emulated")
    if not isinstance(emulated, Mapping) or emulated.get("valid", True):
        return ()
    return ("the emulated devices fell behind their declared times: durations of this run are not valid",)


def _run_subtitle(data: RunData) -> str:
    tp, replicas = data.layout
    words = [f"{replicas} replicas of TP {tp}"] if tp else []
    model = data.config.get("model")
    if isinstance(model, Mapping):
        name = next((str(model[key]) for key in ("preset", "arch", "dir", "from_dir") if model.get(key)), "tiny")
        params = data.summary.get("num_params")
        words.append(f"model {name}" + (f", {people(params)} parameters" if isinstance(params, int) else ""))
    if len(data.starts_s) > 1:
        words.append(f"{len(data.starts_s)} sessions; ledger and goodput are of the last")
    return " · ".join(words)


def run_tiles(data: RunData) -> tuple[Tile, ...]:
    """The numbers up front of a run, as its own files give them."""
    tiles = []
    goodput = data.goodput
    reason = data.books.get("goodput_reason")
    if goodput is not None:
        why = reason if isinstance(reason, str) else "of all tokens that were possible"
        tiles.append(Tile("goodput", f"{100 * goodput:.1f} %", why))
    elif isinstance(reason, str):
        tiles.append(Tile("goodput", "none", reason))
    done = data.summary.get("step", data.devices.get("step"))
    if isinstance(done, int):
        total = data.total_steps
        state = "stopped early" if data.summary.get("stopped") else "finished" if data.summary else ""
        tiles.append(Tile("steps", f"{done:,}" + (f" of {total:,}" if total else ""), state))
    stood = sum(row.stopped_s for row in data.incidents)
    moved = sum(row.bytes_moved for row in data.incidents)
    tiles.append(
        Tile(
            "incidents",
            str(len(data.incidents)),
            f"training stood {people(stood, 's')} in all, {people(moved, 'B')} moved" if data.incidents else "none",
        )
    )
    if data.changes:
        joins = sum(bool(row.joined) for row in data.changes)
        tiles.append(Tile("joins and leaves", str(len(data.changes)), f"{joins} joined while training went on"))
    speed = data.summary.get("tokens_per_s")
    if isinstance(speed, int | float):
        tiles.append(Tile("tokens/s", people(speed), "at the median step"))
    elif data.steps and data.steps[-1].tokens_per_s is not None:
        tiles.append(Tile("tokens/s", people(data.steps[-1].tokens_per_s), "in the last step"))
    states = [row.get("state") for row in data.device_rows]
    if states:
        training = sum(state in ("active", "draining") for state in states)
        tiles.append(Tile("devices training", f"{training} of {len(states)}", "at the end" if data.summary else "now"))
    losses = [step.loss for step in data.steps if step.loss is not None]
    if losses:
        held = data.summary.get("holdout_loss")
        tiles.append(Tile("loss", f"{losses[-1]:.4f}", f"held out {held:.4f}" if isinstance(held, float) else ""))
    if data.wall_s:
        tiles.append(Tile("time", duration(data.wall_s), "since the start"))
    return tuple(tiles)


def _incident_table(rows: Sequence[IncidentRow]) -> Table:
    """What happened, one row an incident."""
    body = []
    for row in rows:
        first = "" if row.first_commit_s is None else f"{row.first_commit_s:.2f} s"
        what = ACTION_WORDS.get(row.action, row.action)
        if row.words:
            what += f" ({'; '.join(row.words)})"
        step = "" if row.step is None else str(row.step)
        who = " and ".join(row.devices) or "links"
        body.append((str(row.number), who, step, row.cause, what, f"{row.stopped_s:.3f} s", first))
    return Table(
        "Incidents",
        "Training stood from the fault until it went on; the first commit came later by the time of its step.",
        ("number", "who", "step", "cause", "what became of the step", "stood", "first commit after"),
        tuple(body),
    )


def _drawable(text: str) -> int | float:
    """A number that can be drawn.

    Raises:
        ValueError: it is beyond all that anybody measures.
    """
    value = float(text)
    if abs(value) > LARGEST:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text) if text.lstrip("-").isdigit() else value


def read_result(path: Path) -> Mapping[str, Any]:
    """A result file.

    Raises:
        DataError: it cannot be read, or is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, parse_int=_drawable, parse_float=_drawable, parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be reported: {error}. Give a run's folder or a result file.") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} cannot be reported: it holds no JSON object. Give a run's folder or a result file.")
    return data


def result_view(path: Path, key: str) -> View:
    """A result of `runflat simulate`, `sweep` or `advise`, or any result file with a figure of lines.

    Raises:
        DataError: the file is none of these, or is damaged.
    """
    data = read_result(path)
    try:
        if "results" in data:
            return _simulation(path, key, data)
        if "options" in data:
            return _advice(path, key, data)
        if "figure" in data:
            return _view(path, key, data, sweep_figures(data), (), ())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be reported: it looks like a result file, but is damaged or of another version "
            f"({type(error).__name__}: {error}). Make it again with the command that wrote it."
        ) from error
    raise DataError(
        f"{path} cannot be reported: it has none of the keys results (runflat simulate), options (runflat advise), "
        f"figure (runflat sweep); its keys are {', '.join(list(map(str, data))[:8])}."
    )


def _view(
    path: Path,
    key: str,
    data: Mapping[str, Any],
    figures: Sequence[Figure],
    tiles: Sequence[Tile],
    tables: Sequence[Table],
) -> View:
    config = data.get("config")
    config = config if isinstance(config, Mapping) else {}
    words = []
    if isinstance(config.get("job"), Mapping):
        job = config["job"]
        words.append(f"TP {job['tp']} x PP {job['pp']} x DP {job['dp']}")
    if "days" in config:
        words.append(f"{config['days']:g} days, {config.get('seeds', 1)} draws of failures")
    origin = data.get("origin")
    kind = "advice" if "options" in data else f"over {data['axis']}" if "axis" in data else ""
    return View(
        key=key,
        name=" ".join([str(data["name"]), *([kind] if kind else [])]),
        subtitle=" · ".join(words),
        source=source_of(str(path), origin if isinstance(origin, Mapping) else {}),
        tiles=tuple(tiles),
        figures=tuple(figures),
        num_before_map=len(figures),
        tables=tuple(tables),
    )


def _simulation(path: Path, key: str, data: Mapping[str, Any]) -> View:
    rows = data["results"]
    best = max(rows, key=lambda row: row["goodput"]["mean"])
    first = rows[0]
    tiles = [
        Tile("best goodput", f"{100 * best['goodput']['mean']:.2f} %", str(best["candidate"])),
        Tile("devices held", f"{first['num_devices']:,}", ""),
        Tile(
            "incidents a day",
            people(sum(count for name, count in best["incidents_per_day"].items() if not name.startswith("+"))),
            f"with {best['candidate']}",
        ),
    ]
    saved = (best["goodput"]["mean"] - first["goodput"]["mean"]) * best["device_hours"]
    if best is not first:
        tiles.append(Tile("device-hours saved", people(saved), f"against {first['candidate']}, over the whole time"))
    body = []
    for row in rows:
        band = row["goodput"]
        incidents = ", ".join(f"{name} {count:.3g}" for name, count in row["incidents_per_day"].items())
        power = f"{row['mean_w'] / 1e6:.3f}" if row["mean_w"] else ""
        numbers = (f"{100 * band['mean']:.3f}", f"{100 * band['p5']:.3f} to {100 * band['p95']:.3f}")
        body.append((str(row["candidate"]), *numbers, f"{row['pauses']:.3g}", incidents, power))
    head = ("strategy", "goodput %", "5 to 95 % of draws", "pauses", "incidents a day", "MW")
    table = Table("Strategies", "Incidents with a plus are returns.", head, tuple(body))
    return _view(path, key, data, simulation_figures(data), tiles, [table])


def _advice(path: Path, key: str, data: Mapping[str, Any]) -> View:
    best = data["best"]
    tiles = [
        Tile("best", str(best["chain"]), f"{best['spare_domains']} spare domains"),
        Tile("goodput", f"{100 * best['goodput']:.2f} %", f"± {100 * best['goodput_error']:.2f} %"),
        Tile("saved a month", people(data["saved_device_h_per_month"], "h"), "device-hours, against restarting"),
    ]
    rows = tuple(
        (str(row["words"]), str(row["chain"]), str(row["spare_domains"]), "as good" if row["same"] else "another")
        for row in data["shifts"]
    )
    table = Table(
        "If it were otherwise",
        "What would be best if a number of the question were another, and whether this advice would then be as good.",
        ("what changes", "best chain", "spare domains", "this advice"),
        rows,
    )
    return _view(path, key, data, advice_figures(data), tiles, [table] if rows else [])
