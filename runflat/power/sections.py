"""Sections of a run's configuration on devices: what is declared of emulated ones, and how power may be steered."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no NaN or infinity, field docstrings kept."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class DeviceSection(Section):
    """What is declared of each device: how fast it is (emulated ones), and how much memory it has."""

    rate_tflops: float | None = Field(default=None, gt=0)
    """Emulated: matrix-product rate of one device at device.tdp_w, in TFLOP/s."""
    curve: str = "ntp"
    """Emulated: speed against power, a named curve (ntp, cube, v100-bert, a40-bert, rtx6000-bert, amdahl),
    exponent:NUMBER or file:PATH."""
    power: float = Field(default=1.0, gt=0)
    """Emulated: power limit in health over device.tdp_w; the curve says how fast that is."""
    tdp_w: float = Field(default=1000.0, gt=0)
    """Emulated: watts that are 1.0 on the curve."""
    max_power: float | None = Field(default=None, gt=0)
    """Emulated: highest power limit over device.tdp_w; none: that of health, so that there is no headroom."""
    min_power: float | None = Field(default=None, gt=0)
    """Emulated: lowest power limit over device.tdp_w; none: that of health, so that no power can be saved."""
    domain_link_gbps: float | None = Field(default=None, gt=0)
    """Emulated: link between the devices of a replica, in Gbit/s; none: tensor-parallel traffic takes no time."""
    network_gbps: float | None = Field(default=None, gt=0)
    """Emulated: link between replicas, in Gbit/s, for gradients and moving state; none: it takes no time."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Rate on the data sheet that MFU is counted against; none: device.rate_tflops where emulated, that of a known GPU
    for bfloat16, else no MFU."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one device in GB that a plan must fit in; none: the free memory that the device reports."""

    @model_validator(mode="after")
    def _power_range(self) -> DeviceSection:
        low, high = self.min_power or self.power, self.max_power or self.power
        if not low <= self.power <= high:
            raise ValueError(
                f"device.power {self.power:g} is outside of device.min_power {low:g} and device.max_power {high:g}"
            )
        return self


class PowerSection(Section):
    """How power is steered where boost or power.save asks for it."""

    curve: str | None = None
    """Speed against power that is counted on, named as in device.curve; none: that of device.curve."""
    domain_budget_w: float | None = Field(default=None, gt=0)
    """Watts that the limits of a replica's devices may add up to, dead ones included; none: only devices' ranges."""
    module_devices: int = Field(default=1, ge=1)
    """Neighbouring devices that share a module (superchip), in the machine's order; layout.tp is a multiple of it."""
    module_budget_w: float | None = Field(default=None, gt=0)
    """Watts that the limits of a module's devices may add up to, dead ones included; none: there are no modules."""
    step_w: float = Field(default=50.0, gt=0)
    """Most by which a limit rises from one step of training to the next."""
    hold_off_s: float = Field(default=60.0, ge=0)
    """After a return to nominal no limit of the replica is raised for this long; doubles each time in a row."""
    save: bool = False
    """Where a replica stays slower all the same, lower the limits of the others to its pace."""
    dry_run: bool = False
    """Say what would be written, and write nothing."""
    lease_s: float = Field(default=30.0, gt=0)
    """After this long without a sign of life the agent restores the nominal limits."""
    agent: Path | None = None
    """Socket of runflat power-agent on this machine; needed for devices that are not emulated. Emulated ones follow the
    limits of the agent's devices."""


def check_curves(steered: bool, emulated: bool, device: DeviceSection, power: PowerSection) -> None:
    """Whether the curves that are named are used.

    Raises:
        ValueError: one is not; says which, and what would use it.
    """
    if power.curve is not None and not steered:
        raise ValueError(
            f"power.curve is {power.curve}, but nothing steers power, so that it would be ignored: ask for boost or "
            f"power.save, or leave it out"
        )
    default = DeviceSection.model_fields["curve"].default
    if device.curve != default and not (steered or emulated):
        raise ValueError(
            f"device.curve is {device.curve}, but devices are not emulated and nothing steers power, so that it would "
            f"be ignored: use devices emulated, ask for boost or power.save, or leave it out"
        )


def check_power(boost: bool, emulated: bool, device: DeviceSection, power: PowerSection) -> None:
    """Whether power can be steered as asked.

    Raises:
        ValueError: something is missing; says what.
    """
    if not emulated and power.agent is None:
        raise ValueError(
            "boost and power.save need power limits that can be set: give the socket of runflat power-agent as "
            "power.agent, or use devices emulated"
        )
    if emulated and boost and power.agent is None and (device.max_power or device.power) <= device.power:
        raise ValueError(
            f"boost is asked for, but device.max_power is {device.max_power or device.power:g} and device.power "
            f"{device.power:g}: there is no headroom. Raise device.max_power, or lower device.power as a site would "
            f"that runs below the maximum"
        )
    if emulated and power.save and power.agent is None and (device.min_power or device.power) >= device.power:
        raise ValueError(
            "power.save is asked for, but device.min_power is not below device.power: no limit can be lowered"
        )
