"""NVIDIA devices through nvidia-ml-py. Reading needs no right; setting needs root and CAP_SYS_ADMIN.

The first version of the setter is used: `nvmlDeviceSetPowerManagementLimit_v2` of nvidia-ml-py 13.615.71 drops the
return code of the library. Handles are looked up by UUID for each call and checked after it, since a device that is
lost or a driver that is reloaded moves indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from runflat.errors import PowerError
from runflat.power.devices import DeviceError, DeviceFacts, ErrorKind, Reading, Reason

REASON_BITS: dict[int, Reason] = {
    0x1: "idle",
    0x4: "power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "power-brake",
    0x200: "board",
    0x400: "reliability",
}
"""Bits of `nvmlDeviceGetCurrentClocksEventReasons` (nvml.h); the others are settings, not limiters."""

Answer = TypeVar("Answer")


class NvmlDevices:
    """A `PowerBackend` over the driver of this machine.

    Raises:
        PowerError: there is no NVML library, or no driver behind it.
    """

    def __init__(self) -> None:
        import pynvml  # only whoever drives real devices needs it

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise PowerError(
                f"no power limit can be read here: NVML answers '{error}'. This needs a machine with an NVIDIA driver "
                "(libnvidia-ml.so.1); in a container, one that is started with the driver's utilities."
            ) from error

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """All devices that answer; one that is lost is left out."""
        nvml = self._nvml
        found = []
        for index in range(self._call("the driver", nvml.nvmlDeviceGetCount)):
            try:
                found.append(self._facts(index))
            except DeviceError as error:
                if error.kind not in ("lost", "unknown"):
                    raise
        return tuple(found)

    def read(self, uuid: str) -> Reading:
        """Limits and state of a device; None for what this device or driver does not say."""
        nvml = self._nvml

        def look() -> Reading:
            handle = self._handle(uuid)
            reading = Reading(
                limit_w=_watts(nvml.nvmlDeviceGetPowerManagementLimit(handle)),
                enforced_w=_watts(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
                draw_w=self._optional(lambda: _watts(nvml.nvmlDeviceGetPowerUsage(handle))),
                temperature_c=self._optional(lambda: self._temperature_c(handle)),
                margin_c=self._margin_c(handle),
                clock_mhz=self._optional(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
                energy_j=self._optional(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
                reasons=self._optional(lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
            )
            self._check_identity(handle, uuid)
            return reading

        return self._call(uuid, look)

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Ask for a limit, in whole milliwatts."""
        nvml = self._nvml

        def write() -> None:
            handle = self._handle(uuid)
            self._check_identity(handle, uuid)
            nvml.nvmlDeviceSetPowerManagementLimit(handle, round(limit_w * 1e3))

        self._call(f"{uuid}, asked for {limit_w:g} W", write)

    def _facts(self, index: int) -> DeviceFacts:
        nvml = self._nvml

        def look() -> DeviceFacts:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(nvml.nvmlDeviceGetUUID(handle))
            low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            facts = DeviceFacts(
                uuid=uuid,
                index=index,
                name=str(nvml.nvmlDeviceGetName(handle)),
                min_w=_watts(low),
                max_w=_watts(high),
                default_w=_watts(nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
            )
            self._check_identity(handle, uuid)
            return facts

        return self._call(f"device {index}", look)

    def _handle(self, uuid: str) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            raise DeviceError("unknown", f"'{uuid}' is not the UUID of a device") from error

    def _check_identity(self, handle: Any, uuid: str) -> None:
        found = str(self._nvml.nvmlDeviceGetUUID(handle))
        if found != uuid:
            raise DeviceError("lost", f"devices were renumbered: the handle of {uuid} leads to {found} now")

    def _temperature_c(self, handle: Any) -> float:
        nvml = self._nvml
        sensor = nvml.NVML_TEMPERATURE_GPU
        newer = self._optional(lambda: float(nvml.nvmlDeviceGetTemperatureV(handle, sensor)))
        return float(nvml.nvmlDeviceGetTemperature(handle, sensor)) if newer is None else newer

    def _margin_c(self, handle: Any) -> float | None:
        nvml = self._nvml
        margin = self._optional(lambda: float(nvml.nvmlDeviceGetMarginTemperature(handle)))
        if margin is not None:
            return margin
        slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return self._optional(
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown) - self._temperature_c(handle)
        )

    def _optional(self, question: Callable[[], Answer]) -> Answer | None:
        """The answer, or None if this device or driver has none to this question."""
        nvml = self._nvml
        try:
            return question()
        except nvml.NVMLError as error:
            if error.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                return None
            raise

    def _call(self, what: str, work: Callable[[], Answer]) -> Answer:
        """Do it; after a driver reload once more, with a fresh start of the library."""
        nvml = self._nvml
        try:
            return work()
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise self._named(what, error) from error
        try:
            nvml.nvmlInit()
            return work()
        except nvml.NVMLError as error:
            raise self._named(what, error) from error

    def _named(self, what: str, error: Any) -> DeviceError:
        nvml = self._nvml
        kinds: dict[int, ErrorKind] = {
            nvml.NVML_ERROR_NOT_FOUND: "unknown",
            nvml.NVML_ERROR_GPU_IS_LOST: "lost",
            nvml.NVML_ERROR_GPU_NOT_FOUND: "lost",
            nvml.NVML_ERROR_NO_PERMISSION: "permission",
            nvml.NVML_ERROR_INVALID_ARGUMENT: "range",
            nvml.NVML_ERROR_NOT_SUPPORTED: "unsupported",
            nvml.NVML_ERROR_TIMEOUT: "slow",
        }
        return DeviceError(kinds.get(error.value, "driver"), f"{what}: NVML answers '{error}'")


def _watts(milliwatts: int) -> float:
    return milliwatts / 1e3


def _reasons(mask: int) -> frozenset[Reason]:
    return frozenset(reason for bit, reason in REASON_BITS.items() if mask & bit)
