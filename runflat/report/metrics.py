"""A run's state in Prometheus' text format, from the run's own files."""

from __future__ import annotations

from collections.abc import Iterator

from runflat.cluster.ledger import GOODPUT_NAMES, Category
from runflat.report.records import number
from runflat.report.run_files import RunData

Sample = tuple[dict[str, str], float]


def prometheus(data: RunData) -> str:
    """All metrics of a run; each begins with `runflat_` and ends with its unit."""
    out = []
    for name, kind, words, samples in metrics(data):
        if samples:
            out.append(f"# HELP {name} {words}\n# TYPE {name} {kind}\n")
            out += [f"{name}{_labels(labels)} {value!r}\n" for labels, value in samples]
    return "".join(out)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics(data: RunData) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """(name, type, help, samples) of each metric of a run."""
    last = data.steps[-1] if data.steps else None
    yield "runflat_goodput_ratio", "gauge", "Committed over possible tokens so far.", _one(data.goodput)
    yield "runflat_step", "gauge", "Steps committed.", _one(number(data.books, "step"))
    yield "runflat_tokens_per_second", "gauge", "Of the newest step.", _one(last.tokens_per_s if last else None)
    yield "runflat_mfu_ratio", "gauge", "Of the devices' declared peak.", _one(last.mfu if last else None)
    yield "runflat_peak_memory_bytes", "gauge", "Most on a device.", _one(last.peak_bytes if last else None)
    yield "runflat_loss", "gauge", "Of the newest step.", _one(last.loss if last else None)
    yield "runflat_device_seconds_total", "counter", "Device time by category of the ledger.", _device_s(data)
    plan = data.plans[max(data.plans)] if data.plans else None
    degrees: list[Sample] = [
        ({"replica": str(replica.replica)}, float(replica.degree)) for replica in (plan.replicas if plan else ())
    ]
    yield "runflat_replica_degree", "gauge", "Live devices of a replica in the newest plan.", degrees
    rows = data.incidents
    yield "runflat_incidents_total", "counter", "Losses of devices.", [({}, float(len(rows)))]
    stood = sum(row.stopped_s for row in rows)
    yield "runflat_recovery_seconds_total", "counter", "Time that training stood in incidents.", [({}, stood)]
    moved = float(sum(row.bytes_moved for row in rows) + sum(row.bytes_moved for row in data.changes))
    yield "runflat_moved_bytes_total", "counter", "State moved in incidents and changes.", [({}, moved)]
    power = last.power if last else None
    yield "runflat_power_watts", "gauge", "Draw of all devices.", _one(power.draw_w if power else None)
    yield "runflat_power_limit_watts", "gauge", "Sum of limits.", _one(power.limit_w if power else None)
    rows_w = power.devices if power else ()
    drawn: list[Sample] = [({"device": name}, draw_w) for name, _, draw_w in rows_w if draw_w is not None]
    yield "runflat_device_power_watts", "gauge", "Draw of a device.", drawn
    limits: list[Sample] = [({"device": name}, limit_w) for name, limit_w, _ in rows_w]
    yield "runflat_device_power_limit_watts", "gauge", "Limit of a device.", limits
    states: dict[str, int] = {}
    for row in data.device_rows:
        state = str(row.get("state"))
        states[state] = states.get(state, 0) + 1
    counts: list[Sample] = [({"state": state}, float(count)) for state, count in states.items()]
    yield "runflat_devices", "gauge", "Devices by state.", counts


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [({}, float(value))]


def _device_s(data: RunData) -> list[Sample]:
    known = {category.value: GOODPUT_NAMES[category] for category in Category}
    return [({"category": name, "type": known.get(name, "OTHER")}, seconds) for name, seconds in data.ledger]
