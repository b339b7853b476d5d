"""Emulated devices: computation and collectives are real, their duration is declared.

A virtual clock, common to all devices, is billed FLOPs / (rate x speed) per step and device, and takes the maximum over
the devices where they meet. Each device sleeps until wall time has caught up with its bill, so that the ratios of step
times depend on plan and power, and not on who else uses the machine. What really takes longer than the bill makes the
clock late; lateness is recorded, and a run that fell behind says so.

It shows synchronisation, stragglers, recovery and control. It does not show kernel speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runflat.parallel.comms import Comms, Group
from runflat.plan.batch import micro_batches
from runflat.plan.cost import device_traffic, sequence_flops
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import ModelSpec
from runflat.plan.zero import Ownership

BACKWARD_SHARE = 2 / 3
"""Part of a step's computation that is backward: gradient exchange is billed only where it outlasts that."""
RECOMPUTED = 4 / 3
"""Work with layers computed again in backward, over that without (the LM head, which is not a layer, with them)."""
LATE_SHARE = 0.05
"""A run that fell behind by more than this part of its billed time is invalid."""


@dataclass(frozen=True)
class DeviceModel:
    """What is declared of each emulated device. Rates are per second; None bills nothing.

    `speed` is relative to nominal power; `compute_bytes` is the width of hidden states, and with `recompute` backward
    computes layers again. With `sequence_parallel` tokens are split between the split layers.
    """

    rate_flops: float
    domain_bytes: float | None = None
    network_bytes: float | None = None
    speed: float = 1.0
    compute_bytes: int = 4
    recompute: bool = False
    sequence_parallel: bool = False


def step_seconds(
    model: DeviceModel,
    spec: ModelSpec,
    plan: Plan,
    layout: SyncLayout,
    place: Place,
    seq_len: int,
    micro_batch: int,
    owned: Ownership | None = None,
) -> float:
    """Declared seconds of one step on the device at `place`: computation, tensor-parallel and exposed sync traffic.

    Weights that other devices have updated (`owned`: with `zero1`) come after backward, so that nothing hides them.
    """
    replica = plan.replica(place[0])
    flops = sequence_flops(spec, replica, place[1], seq_len) * replica.num_sequences
    compute_s = flops / (model.rate_flops * model.speed) * (RECOMPUTED if model.recompute else 1)
    how = (micro_batch, 4, model.compute_bytes, model.recompute, model.sequence_parallel)
    traffic = device_traffic(spec, plan, layout, place, seq_len, *how, owned)
    total_s, sync_s = compute_s, 0.0
    if model.domain_bytes:
        total_s += traffic.tp_bytes / model.domain_bytes
        sync_s += traffic.reshard_bytes / model.domain_bytes
    if model.network_bytes:
        sync_s += (traffic.sync_bytes + traffic.replicated_bytes) / model.network_bytes
        total_s += traffic.gathered_bytes / model.network_bytes
    share = BACKWARD_SHARE / len(micro_batches(replica.num_sequences, micro_batch))
    return total_s + max(0.0, sync_s - share * compute_s)


class Pace:
    """The virtual clock of one device.

    Of the last step are `billed_s`, its declared seconds, `own_s`, those of the slowest device of this replica, and
    `late_s`, by which real time fell behind.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Start at zero."""
        self._clock = clock
        self._sleep = sleep
        self._virtual_s = 0.0
        self._base = clock()
        self._own_end_s = 0.0
        self.step_s = 0.0
        self.late_s = 0.0
        self.billed_s = 0.0
        self.own_s = 0.0

    def rebase(self, step_s: float) -> None:
        """A plan begins, in which a step of this device takes `step_s`: the time until now was real, not billed.

        All devices of the plan begin at zero: a newcomer's clock must not lag behind that of the others.
        """
        self._base = self._clock()
        self._virtual_s = 0.0
        self.step_s = step_s

    def computed(self, factor: float = 1.0) -> None:
        """The computation of a step has really ended: sleep until it has also ended by the declared time.

        `factor` is how many times as long it takes on a slowed device.
        """
        now = self._clock()
        self._own_end_s = self._virtual_s + self.step_s * factor
        left_s = self._base + self._own_end_s - now
        if left_s > 0:
            self._sleep(left_s)

    def hold(self, replica: Group) -> None:
        """The devices of a replica compute together: none ends before its slowest, for which the others wait."""
        latest = torch.tensor([self._own_end_s], dtype=torch.float64)
        replica.all_reduce(latest, "max")
        self._own_end_s = float(latest)

    def meet(self, comms: Comms) -> None:
        """All devices have ended the step: the clock goes on to the latest of them."""
        latest = torch.tensor([self._own_end_s], dtype=torch.float64)
        comms.reduce(latest, "max")
        end_s = float(latest)
        self.own_s = self._own_end_s - self._virtual_s
        self.billed_s = end_s - self._virtual_s
        self._virtual_s = end_s
        # Work after the bill (exchange, update) is absorbed by the next step's sleep; what is left then is lateness.
        self.late_s = max(self._clock() - self._base - self._virtual_s - self.step_s, 0.0)
        self._base += self.late_s


def kept_up(late_s: float, billed_s: float) -> bool:
    """Whether real time kept up with the declared one over a run."""
    return late_s <= LATE_SHARE * billed_s
