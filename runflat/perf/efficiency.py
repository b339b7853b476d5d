"""The few numbers that are fitted to published measurements, and the ones that are assumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from importlib import resources


@dataclass(frozen=True)
class Efficiencies:
    """One set for all hardware and models: which fraction of a rate in the hardware file a training step reaches.

    The first five are fitted by `runflat.perf.fitting`; the others are assumed, with these reasons: 0.44 is what
    FlashAttention-2 reaches on an H100 (35 % of the peak, arXiv 2407.08608; the sustained rate is 73 to 80 %); a large
    message comes close to line rate; of an overlapped reduction a fifth shows, as its kernels take multiprocessors and
    memory bandwidth from the backward pass, and the last bucket ends after it.

    Attributes:
        matmul: of the sustained matrix-product rate, once tiles and waves are counted.
        memory: of the memory bandwidth, by norms, activations, softmax, loss and optimizer.
        link: of the bandwidth inside the domain, by collectives.
        network: of the network port, by collectives.
        tp_hidden: part of an overlappable tensor-parallel collective that runs under matrix products.
        attention: of the sustained matrix-product rate, by fused attention.
        send: of the network port, by one stage-to-stage send.
        dp_hidden: largest part of gradient sync that the backward pass can hide.
    """

    matmul: float
    memory: float
    link: float
    network: float
    tp_hidden: float
    attention: float = 0.44
    send: float = 0.8
    dp_hidden: float = 0.8


FITTED = ("matmul", "memory", "link", "network", "tp_hidden")
"""Names of the fitted fields."""

assert set(FITTED) <= {field.name for field in fields(Efficiencies)}


def load_efficiencies() -> Efficiencies:
    """The fitted set that comes with the package (written by `experiments/step_time/fit.py`)."""
    text = (resources.files("runflat.perf") / "efficiencies.json").read_text(encoding="utf-8")
    return Efficiencies(**json.loads(text))


def efficiencies_to_json(efficiencies: Efficiencies) -> str:
    """The text of an efficiencies file, four digits each."""
    return json.dumps({name: round(value, 4) for name, value in asdict(efficiencies).items()}, indent=2) + "\n"
