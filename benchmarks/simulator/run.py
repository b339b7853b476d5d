"""How fast the simulator is, on one core.

    python benchmarks/simulator/run.py

Writes result.json and README.md beside itself: five strategies over 54 days of 32,768 devices; 1,000 draws of 15 days
for one strategy; time per event from 1,024 to 1,048,576 devices; peak memory of all of it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from runflat.check.bench import arguments, report
from runflat.sim.config import JobConfig, SimConfig
from runflat.sim.experiment import make_trace, run_all, simulate
from runflat.traces.generate import LLAMA3_DEVICE_DAYS, FailureSource, hardware_software

STRATEGIES = ("restart", "spare,restart", "drop,restart", "ntp,drop,restart", "spare,ntp,drop,restart")
SIZES = (1024, 32_768, 1_048_576)
DAYS = {1024: 1500.0, 32_768: 47.0, 1_048_576: 1.5}
"""About as many events at each size."""


def question(num_devices: int, days: float, strategies: tuple[str, ...] = ("ntp,drop,restart",)) -> SimConfig:
    """A job of TP 8 x PP 16 at the Llama 3 rate, repairs of five days."""
    return SimConfig(
        job=JobConfig(tp=8, pp=16, dp=num_devices // 128, local_batch=16),
        failures=FailureSource(
            components=hardware_software(419, LLAMA3_DEVICE_DAYS, hardware_h=120), start="steady", burn_in_days=5
        ),
        strategies=strategies,
        days=days,
        seeds=1,
    )


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of a piece of work."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def per_event_us(num_devices: int) -> float:
    """Microseconds per failure or return: what three times the days take longer, the best of five."""
    found = []
    for days in (DAYS[num_devices], 3 * DAYS[num_devices]):
        config = question(num_devices, days)
        trace = make_trace(config, 0)
        best_s = min(seconds(partial(simulate, config, config.strategies[0], trace)) for _ in range(5))
        # Devices that are down at the start are settled before the first event, so they are not events.
        found.append((best_s, 2 * int((trace.time_s > 0).sum())))
    (short_s, few), (long_s, many) = found
    return (long_s - short_s) / (many - few) * 1e6


def measure(num_draws: int = 1000) -> dict[str, float]:
    """All numbers, by name with unit."""
    many = question(32_768, 15).model_copy(update={"seeds": num_draws})
    result = {
        "five_strategies_54_days_s": seconds(lambda: run_all(question(32_768, 54, STRATEGIES))),
        f"draws_{num_draws}_of_15_days_s": seconds(lambda: run_all(many, record=False)),
        **{f"per_event_us_{size}": per_event_us(size) for size in SIZES},
    }
    rates = [result[f"per_event_us_{size}"] for size in SIZES]
    result["per_event_largest_over_smallest"] = max(rates) / min(rates)
    result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def main() -> None:
    """Measures, writes result.json and README.md. It is quick as it is."""
    parser = arguments(__doc__, Path(__file__).parent)
    parser.add_argument("--draws", type=int, default=1000)
    args = parser.parse_args()
    found = measure(args.draws)
    rows = [
        ("32,768 GPUs, 54 days, five strategies", f"{found['five_strategies_54_days_s']:.2f} s", "< 2 s"),
        (
            f"{args.draws} draws of 15 days, one strategy",
            f"{found[f'draws_{args.draws}_of_15_days_s']:.1f} s",
            "< 60 s",
        ),
        *((f"time of an event with {size:,} GPUs", f"{found[f'per_event_us_{size}']:.0f} us", "") for size in SIZES),
        ("largest over smallest of these", f"{found['per_event_largest_over_smallest']:.2f}", "<= 2"),
        ("peak memory", f"{found['peak_memory_mb']:.0f} MB", "< 1,000 MB"),
    ]
    report(args.out, "Speed of the simulator, on one core", __doc__.partition("\n\n")[0], rows, found)


if __name__ == "__main__":
    main()
