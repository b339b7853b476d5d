"""Ready questions: the cluster of the NTP paper, that of Llama 3, GB200 NVL72 racks, and 64 GPUs of a small lab."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule
from runflat.sim.config import ClusterConfig, JobConfig, PowerConfig, RecoveryConfig, SimConfig
from runflat.traces.generate import (
    LLAMA3_DEVICE_DAYS,
    Component,
    FailureSource,
    Repair,
    hardware_software,
    llama3_components,
)

INFINITEHBD_NODE_DAY = 4.18e-3
"""Failures per server and day in InfiniteHBD-Trace (400 servers, 348 days)."""
INFINITEHBD_REPAIR = Repair(kind="weibull", hours=50.7, shape=0.451)
"""Best fit of its 570 repair times that are not zero; the tail is heavy: median 20 h, mean 133 h."""
HARDWARE_REPAIR = Repair(kind="weibull", hours=66.5, shape=0.418)
"""The same for its hardware faults."""


def preset_names() -> tuple[str, ...]:
    """Names that :func:`preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> SimConfig:
    """The ready question of that name.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in _PRESETS:
        raise ConfigError(f"unknown preset {name!r}; allowed: {', '.join(_PRESETS)}")
    return _PRESETS[name]()


def _ntp_paper() -> SimConfig:
    """32,000 B200 in NVL32 domains, TP 32 x PP 8 x DP 125, reduced degrees 30 and 28: arXiv 2504.06095.

    Restart and checkpoint losses are not in that paper's numbers, so costs are zero here.
    """
    return SimConfig(
        name="ntp-paper",
        cluster=ClusterConfig(hardware="b200", domain_size=32),
        job=JobConfig(tp=32, pp=8, dp=125, local_batch=8, seq_len=16_384, degrees=(30, 28)),
        failures=FailureSource(components=hardware_software(419, LLAMA3_DEVICE_DAYS, hardware_h=120)),
        recovery=RecoveryConfig(
            detect_s=0, reform_s=0, transfer_s=0, join_s=0, restart_s=0, checkpoint_save_s=0, discard_step=False
        ),
        power=PowerConfig(curve="ntp", tdp_w=1000, nominal_w=1000, max_w=1300),
        strategies=("drop", "ntp", "ntp+boost"),
        rule=BatchRule.FLEXIBLE,
        days=15,
        seeds=20,
    )


def _llama3() -> SimConfig:
    """16,384 H100, TP 8 x PP 16 x DP 128: arXiv 2407.21783, Tables 4 (400 TFLOP/s per GPU) and 5 (failures)."""
    components = llama3_components(hardware=HARDWARE_REPAIR, software=Repair(hours=3))
    return SimConfig(
        name="llama3",
        cluster=ClusterConfig(hardware="h100", domain_size=8, spare_domains=64),
        # 6 x 405e9 parameters x 16.8e6 tokens / (16,384 x 400e12) = 6.2 s.
        job=JobConfig(
            tp=8, pp=16, dp=128, local_batch=16, virtual_stages=7, step_s=6.2, attention_heads=128, attention_share=0.15
        ),
        failures=FailureSource(components=components),
        recovery=RecoveryConfig(restart_s=600, checkpoint_save_s=2, restart_to_rejoin=True),
        strategies=(
            "restart",
            "spare,restart",
            "drop,restart",
            "ntp,drop,restart",
            "spare,ntp,drop,restart",
        ),
        days=54,
        seeds=10,
    )


def _gb200() -> SimConfig:
    """128 NVL72 racks: TP 64 and eight left-over GPUs in each, run below their maximum (960 of 1,200 W)."""
    node = INFINITEHBD_NODE_DAY / 8
    return SimConfig(
        name="gb200",
        cluster=ClusterConfig(hardware="gb200", domain_size=72),
        job=JobConfig(tp=64, pp=4, dp=32, local_batch=16, step_s=10, attention_heads=128, attention_share=0.2),
        failures=FailureSource(
            components=(
                Component(name="GPU", per_device_day=0.9 * node, repair=INFINITEHBD_REPAIR),
                # A compute tray has four GPUs; five per cent spreading follows arXiv 2503.11901 on NVLink errors.
                Component(name="tray", per_device_day=0.05 * node, repair=INFINITEHBD_REPAIR, blast=4),
                Component(name="link", per_device_day=0.05 * node, repair=Repair(hours=3), blast=2),
            ),
            start="steady",
            burn_in_days=60,
        ),
        power=PowerConfig(curve="ntp", tdp_w=1200, nominal_w=960, max_w=1200),
        strategies=("drop,restart", "ntp,drop,restart", "ntp+boost,drop,restart", "spare,ntp+boost,drop,restart"),
        days=60,
        seeds=10,
    )


def _lab() -> SimConfig:
    """Eight servers of eight GPUs with the failures of InfiniteHBD-Trace: bursts, weak nodes, long repairs."""
    return SimConfig(
        name="lab",
        cluster=ClusterConfig(hardware="h100", domain_size=8),
        job=JobConfig(tp=8, dp=8, local_batch=8, seq_len=4096, step_s=8, attention_heads=64, attention_share=0.15),
        failures=FailureSource(
            components=(
                Component(
                    name="GPU", per_device_day=INFINITEHBD_NODE_DAY / 8 * 0.6, repair=INFINITEHBD_REPAIR, blast=1
                ),
                Component(
                    name="server", per_device_day=INFINITEHBD_NODE_DAY / 8 * 0.4, repair=INFINITEHBD_REPAIR, blast=8
                ),
            ),
            burst_shape=0.62,
            weak_node_shape=0.9,
        ),
        recovery=RecoveryConfig(
            restart_s=300, restart_to_rejoin=True, checkpoint_save_s=2, detect_s=10, reform_s=2, transfer_s=3
        ),
        strategies=("restart", "drop,restart", "ntp,drop,restart"),
        days=365,
        seeds=40,
    )


_PRESETS: Mapping[str, Callable[[], SimConfig]] = {
    "llama3": _llama3,
    "ntp-paper": _ntp_paper,
    "gb200": _gb200,
    "lab": _lab,
}
