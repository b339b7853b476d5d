"""Gradient exchange with a dead slot: bytes, seconds on links of declared speed, and how much of it backward hides.

    python benchmarks/exchange/run.py

Parameters, hooks, buckets and collectives are the trainer's own, on ranks that are threads; bytes are counted at the
calls. Backward is replaced by its declared seconds, and what was launched is replayed on declared links: ports share
their bandwidth max-min fairly, latency is not counted. So the machine decides nothing. Two replicas of a llama3-70b
with a thirty-second of its width, slot 1 of one of them dead. Links inside a replica are nine times the others, and
backward takes twice as long as the exchange of the failure-free job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from runflat.check.bench import arguments, report
from runflat.check.exchange import Recorded, record
from runflat.check.timeline import Links
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import Sync, sync_layout
from runflat.plan.units import ModelSpec

NETWORK_BYTES = 50e9
LINKS = Links(domain_bytes=9 * NETWORK_BYTES, network_bytes=NETWORK_BYTES)
EXCHANGE_SHARE = 0.5
"""Failure-free exchange over backward of the last micro-batch."""
WANTED_BYTES = {8: 0.80, 4: 0.65}
WANTED_TIME, WANTED_GROWTH, WANTED_HIDDEN = 0.95, 1.05, 0.80
DEAD = (1, 1)
SEQUENCES, SEQ_LEN = 32, 4096


def model(num_layers: int, tp: int) -> ModelSpec:
    """A narrow llama3-70b, in which layers and vocabulary keep their shares of the parameters."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=256,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=4,
        intermediate_size=896,
        vocab_size=4008 * num_layers // 80,
    )
    return read_rules(build_meta_model(config, torch.float32), tp).spec


def job(spec: ModelSpec, tp: int, dead: bool, sync: Sync, backward_s: float, bucket_bytes: int) -> Recorded:
    """One step, recorded."""
    plan = build_plan(spec, live_devices(tp, 2, [DEAD] if dead else []), tp, SEQUENCES, SEQ_LEN)
    return record(spec, plan, sync_layout(spec, plan, bucket_bytes, 4, sync), backward_s)


def measure(tp: int, num_layers: int, bucket_bytes: int) -> dict[str, Any]:
    """Everything for full degree `tp`: ratios, and the numbers that they are made of."""
    spec = model(num_layers, tp)
    alone_s = job(spec, tp, False, "direct", 1.0, bucket_bytes).alone_s(LINKS)
    how = (alone_s / EXCHANGE_SHARE, bucket_bytes)
    full = job(spec, tp, False, "direct", *how)
    direct, reshard = (job(spec, tp, True, sync, *how) for sync in ("direct", "reshard"))
    healthy = [place for place in direct.plan.places if place[0] != DEAD[0]]
    growth = {place: direct.sent_bytes(place) / full.sent_bytes(place) for place in direct.plan.places}
    busiest = {name: max(map(found.sent_bytes, healthy)) for name, found in (("direct", direct), ("reshard", reshard))}
    phases = {"direct": direct.phases_s(LINKS), "reshard": reshard.phases_s(LINKS)}
    return {
        "busiest_healthy_device_bytes": busiest,
        "bytes_ratio": busiest["direct"] / busiest["reshard"],
        "phases_s": phases,
        "time_ratio": sum(phases["direct"]) / sum(phases["reshard"]),
        "pipelined_time_ratio": direct.alone_s(LINKS) / reshard.alone_s(LINKS),
        "growth_healthy": max(growth[place] for place in healthy if place[1] != DEAD[1]),
        "growth_survivors": max(growth[place] for place in growth if place not in healthy),
        "hidden": {
            "failure_free": full.hidden(LINKS),
            "direct": direct.hidden(LINKS),
            "reshard": reshard.hidden(LINKS),
        },
    }


def rows_of(tp: int, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the page for one degree."""
    name = f"TP {tp}+{tp - 1}"
    survivors = WANTED_GROWTH * tp / (tp - 1)
    hidden = found["hidden"]
    return [
        (f"{name}: bytes of the busiest healthy device, direct / reshard", f"{found['bytes_ratio']:.3f}",
         f"<= {WANTED_BYTES[tp]:.2f}"),
        (f"{name}: seconds with nothing overlapped, direct / reshard", f"{found['time_ratio']:.3f}",
         f"<= {WANTED_TIME:.2f}"),
        (f"{name}: the same where buckets overlap each other", f"{found['pipelined_time_ratio']:.3f}", ""),
        (f"{name}: direct / failure-free, bytes of healthy devices at other slots", f"{found['growth_healthy']:.3f}",
         f"<= {WANTED_GROWTH:.2f}"),
        (f"{name}: the same for survivors", f"{found['growth_survivors']:.3f}", f"<= {survivors:.3f}"),
        *(
            (f"{name}: part of the exchange that backward hides, {mode.replace('_', '-')}", f"{hidden[mode]:.1%}",
             f">= {WANTED_HIDDEN:.0%}")
            for mode in hidden
        ),
    ]  # fmt: skip


def main() -> None:
    """Measures, writes result.json and README.md."""
    args = arguments(__doc__, Path(__file__).parent).parse_args()
    torch.set_num_threads(1)
    num_layers, bucket_bytes = (8, 1 << 20) if args.quick else (40, 1 << 20)
    results = {tp: measure(tp, num_layers, bucket_bytes) for tp in WANTED_BYTES}
    rows = [row for tp, found in results.items() for row in rows_of(tp, found)]
    text = __doc__.partition("run.py\n\n")[2].strip()
    data = {"num_layers": num_layers, "bucket_bytes": bucket_bytes, "links": vars(LINKS), "by_tp": results}
    report(args.out, "Gradient exchange with a dead slot (declared time)", text, rows, data)


if __name__ == "__main__":
    main()
