"""From a configuration to the way in which power is steered: an emulated agent, or the one at a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from runflat.cluster.ledger import append_json_line
from runflat.config import TrainConfig
from runflat.errors import ConfigError
from runflat.power import client
from runflat.power.client import AgentClient, LocalAgent
from runflat.power.curve import PowerCurve, curve_named
from runflat.power.emulated import emulated_devices
from runflat.power.link import Link
from runflat.power.reach import PowerLimits
from runflat.power.site import DeviceLimits, SiteLimits
from runflat.power.views import Rules
from runflat.power.wire import MAX_DEVICES, DeviceState, Failure

if TYPE_CHECKING:
    from runflat.elastic.power_setting import PowerSetting


class Budgets(TypedDict):
    """Fields of `PowerLimits` that a configuration gives as they are."""

    domain_budget_w: float | None
    module_budget_w: float | None
    module_devices: int


AGENT_TIMEOUT_S = 3.0
"""Deadline of a call to the agent. The run does not wait for it, but old readings end a boost."""


def power_setting(
    config: TrainConfig, devices: Sequence[str], run: Path, clock: Callable[[], float] = time.monotonic
) -> PowerSetting | None:
    """How power is steered in a run of ``devices``, in the order in which they have the machine's; None if it is not.

    Raises:
        ConfigError: the agent does not answer, or its devices do not fit.
    """
    if not (config.boost or config.power.save):
        return None
    found = _setting(config, devices, run, clock)
    return found if config.power.save else replace(found, min_w=None)


def calibration_setting(
    config: TrainConfig, devices: Sequence[str], run: Path, clock: Callable[[], float] = time.monotonic
) -> PowerSetting:
    """How power is steered in a run that measures a curve: between nominal and the lowest limit, never above.

    Raises:
        ConfigError: the agent does not answer, its devices do not fit, or no limit can be lowered.
    """
    found = replace(_setting(config, devices, run, clock), raises=False, dry_run=False)
    if found.min_w is None or found.min_w >= found.limits.nominal_w:
        raise ConfigError(
            f"no limit can go below the nominal {found.limits.nominal_w:g} W, but a curve is measured there: give the "
            f"devices a floor_w in the power agent's limits file, or emulated ones a device.min_power"
        )
    return found


def _setting(config: TrainConfig, devices: Sequence[str], run: Path, clock: Callable[[], float]) -> PowerSetting:
    if len(devices) > MAX_DEVICES:
        raise ConfigError(
            f"power can be steered for {MAX_DEVICES} devices of one agent, not for {len(devices)}; leave boost out"
        )
    if config.devices == "emulated" and config.power.agent is None:
        return _emulated(config, devices, run, clock)
    return _from_agent(config, devices)


def _emulated(config: TrainConfig, devices: Sequence[str], run: Path, clock: Callable[[], float]) -> PowerSetting:
    from runflat.elastic.power_setting import PowerSetting

    device = config.device
    nominal_w, max_w = device.power * device.tdp_w, (device.max_power or device.power) * device.tdp_w
    min_w = (device.min_power or device.power) * device.tdp_w
    real = curve_named(device.curve)
    watts = {"nominal_w": nominal_w, "max_w": max_w, "min_w": min_w, "tdp_w": device.tdp_w}
    backend = emulated_devices(devices, real, **watts, clock=clock)
    limits = DeviceLimits(nominal_w=nominal_w, ceiling_w=max_w, floor_w=min_w)
    site = SiteLimits(
        allow_uids=(0,), max_lease_s=max(config.power.lease_s, 1.0), devices=dict.fromkeys(devices, limits)
    )

    def audit(event: str, facts: object) -> None:
        append_json_line(run / "power.jsonl", {"event": event, "time_s": clock(), "facts": facts})

    budgets = _budgets(config)
    # What is counted on may differ from what is: the emulated devices follow device.curve.
    counted = curve_named(config.power.curve) if config.power.curve else real
    return PowerSetting(
        rules=_rules(config, counted, device.tdp_w),
        limits=PowerLimits(
            curve=counted,
            tdp_w=device.tdp_w,
            nominal_w=nominal_w,
            max_w=max_w,
            **budgets,
        ),
        link=Link(LocalAgent(site, backend, audit, clock), config.power.lease_s, clock, own_thread=False),
        uuids={name: name for name in devices},
        min_w=min_w,
        ttl_s=config.power.lease_s,
        emulated_speed=lambda limit_w: real.ratio(limit_w / device.tdp_w, device.power),
        raises=config.boost,
        dry_run=config.power.dry_run,
    )


def _from_agent(config: TrainConfig, devices: Sequence[str]) -> PowerSetting:
    """Devices are the agent's in the order of their indexes, as the local launcher gives them out."""
    from runflat.elastic.power_setting import PowerSetting

    assert config.power.agent is not None
    port = AgentClient(config.power.agent, AGENT_TIMEOUT_S)
    found = client.read(port)
    if isinstance(found, Failure):
        raise ConfigError(f"the power agent does not help: {found.text}. Start it, or leave boost and power.save out")
    known = sorted(found.devices, key=lambda state: (state.index is None, state.index))
    if len(known) < len(devices):
        raise ConfigError(
            f"the power agent at {config.power.agent} has {len(known)} devices, but the run has {len(devices)}; add "
            f"the others to its limits file"
        )
    ours = known[: len(devices)]
    nominal_w, max_w, min_w = _common(ours)
    if config.boost and max_w <= nominal_w:
        raise ConfigError(
            f"boost is asked for, but the limits file of the power agent lets its devices have {nominal_w:g} W, which "
            f"is their nominal limit: there is no headroom. Raise ceiling_w, or lower the nominal limit as a site "
            f"would that runs below the maximum"
        )
    device, budgets = config.device, _budgets(config)
    real, tdp_w = curve_named(device.curve), nominal_w / device.power
    counted = curve_named(config.power.curve) if config.power.curve else real
    speed = None if config.devices != "emulated" else lambda limit_w: real.ratio(limit_w / tdp_w, device.power)
    return PowerSetting(
        rules=_rules(config, counted, tdp_w),
        limits=PowerLimits(
            curve=counted,
            tdp_w=tdp_w,
            nominal_w=nominal_w,
            max_w=max_w,
            **budgets,
        ),
        link=Link(port, config.power.lease_s),
        uuids={name: state.uuid for name, state in zip(devices, ours, strict=True)},
        min_w=min_w,
        ttl_s=config.power.lease_s,
        emulated_speed=speed,
        raises=config.boost,
        dry_run=config.power.dry_run or found.dry_run,
    )


def _common(states: Sequence[DeviceState]) -> tuple[float, float, float]:
    """(nominal, ceiling, floor) of devices that must have the same nominal limit."""
    nominal = {state.nominal_w for state in states}
    if len(nominal) > 1:
        raise ConfigError(
            f"the devices of the run have different nominal limits ({', '.join(f'{w:g} W' for w in sorted(nominal))}); "
            f"boost needs alike devices"
        )
    return nominal.pop(), min(state.ceiling_w for state in states), max(state.floor_w for state in states)


def _budgets(config: TrainConfig) -> Budgets:
    power = config.power
    return {
        "domain_budget_w": power.domain_budget_w,
        "module_budget_w": power.module_budget_w,
        "module_devices": power.module_devices,
    }


def _rules(config: TrainConfig, curve: PowerCurve, tdp_w: float) -> Rules:
    return Rules(
        curve=curve,
        tdp_w=tdp_w,
        step_w=config.power.step_w,
        hold_off_s=config.power.hold_off_s,
        save=config.power.save,
    )
