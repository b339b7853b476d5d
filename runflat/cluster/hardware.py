"""Facts about accelerators, read from files with units in their keys and a source beside each number.

A file describes one kind of device together with the fast domain that it sits in and its share of the network. The
files of the package lie in `runflat/cluster/devices`; a user's own file has the same form and is named by its path.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runflat.errors import ConfigError

_FOLDER = resources.files("runflat.cluster") / "devices"


class Fact(BaseModel):
    """One number and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(gt=0)
    source: str = Field(min_length=1)


class Hardware(BaseModel):
    """One kind of device, its domain and its network port.

    `peak` rates are the vendor's dense figures, used for utilisation only; `sustained` ones are what a large matrix
    product reaches on the device within its power limit, and are what times are computed from. Bandwidths are per
    device and direction. Prefixes are decimal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    description: str
    bf16_peak_tflops: Fact
    bf16_sustained_tflops: Fact
    fp8_peak_tflops: Fact | None = None
    fp8_sustained_tflops: Fact | None = None
    num_sms: Fact
    memory_gb: Fact
    memory_gbytes_per_s: Fact
    link_gbytes_per_s: Fact
    domain_size: Fact
    network_gbits_per_s: Fact
    link_latency_us: Fact
    network_latency_us: Fact
    launch_us: Fact
    max_power_w: Fact
    min_power_w: Fact

    @model_validator(mode="after")
    def _consistent(self) -> Hardware:
        for low, high in (
            ("bf16_sustained_tflops", "bf16_peak_tflops"),
            ("fp8_sustained_tflops", "fp8_peak_tflops"),
            ("min_power_w", "max_power_w"),
        ):
            small, large = getattr(self, low), getattr(self, high)
            if (small is None) != (large is None):
                raise ValueError(f"{low} and {high} belong together: give both or neither")
            if small is not None and small.value > large.value:
                raise ValueError(f"{low} is {small.value:g}, above {high} = {large.value:g}")
        for whole in ("num_sms", "domain_size"):
            if getattr(self, whole).value % 1:
                raise ValueError(f"{whole} is {getattr(self, whole).value:g}: a count is a whole number")
        return self

    def matmul_flops_per_s(self, precision: str) -> float:
        """FLOP/s that a large matrix product reaches at `precision`: bf16, fp16 or fp8.

        Raises:
            ConfigError: the device has no fp8 units.
        """
        return self._tflops(precision, "sustained") * 1e12

    def peak_flops_per_s(self, precision: str) -> float:
        """Dense FLOP/s on the data sheet at `precision`, the denominator of utilisation."""
        return self._tflops(precision, "peak") * 1e12

    def _tflops(self, precision: str, which: str) -> float:
        fact: Fact | None = getattr(self, f"{'fp8' if precision == 'fp8' else 'bf16'}_{which}_tflops")
        if fact is None:
            raise ConfigError(
                f"hardware '{self.name}' has no fp8 rate: use bf16, or add fp8_{which}_tflops to its file."
            )
        return fact.value

    @property
    def sms(self) -> int:
        """Streaming multiprocessors, the places that the tiles of a matrix product run on."""
        return int(self.num_sms.value)

    @property
    def domain(self) -> int:
        """Devices joined by fast links."""
        return int(self.domain_size.value)

    @property
    def memory_bytes(self) -> float:
        """Device memory."""
        return self.memory_gb.value * 1e9

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the device memory."""
        return self.memory_gbytes_per_s.value * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of one device into its domain, one direction."""
        return self.link_gbytes_per_s.value * 1e9

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth of one device's network port, one direction."""
        return self.network_gbits_per_s.value * 1e9 / 8


def hardware_names() -> tuple[str, ...]:
    """Names of the devices that come with the package, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))
    )


def load_hardware(name: str) -> Hardware:
    """The device called `name`, or described by the file at the path `name` (anything that ends in .json).

    Raises:
        ConfigError: no such device or file, or a file with a missing, unknown, unsourced or contradictory entry.
    """
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no hardware file '{name}': give the path of a JSON file, or a known device.")
        text = path.read_text(encoding="utf-8")
    elif name in hardware_names():
        text = (_FOLDER / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"hardware '{name}' is not known: use one of {', '.join(hardware_names())}, or the path of your own "
            ".json file."
        )
    return parse_hardware(text, name)


def parse_hardware(text: str, origin: str) -> Hardware:
    """The device that the JSON `text` describes; `origin` names it in errors (ConfigError)."""
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"hardware file '{origin}' is not JSON (line {error.lineno}: {error.msg}): correct it."
        ) from error
    try:
        return Hardware.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f'hardware file \'{origin}\': {where}: {first["msg"]}. Each entry is {{"value": number, "source": text}}; '
            "runflat/cluster/devices/h100.json shows a complete file."
        ) from error
