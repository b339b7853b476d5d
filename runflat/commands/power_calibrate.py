"""`runflat power calibrate`: how fast power makes a training job, measured by lowering limits while it trains."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from runflat.commands.boosting import calibration_setting
from runflat.commands.train import parse
from runflat.commands.training import train
from runflat.config import TrainConfig
from runflat.errors import ConfigError, RunError
from runflat.power.calibrate import SETTLE_STEPS, WARM_UP_STEPS, Fit, Level, Walk, fit, levels_w
from runflat.power.curve import curve_to_json

if TYPE_CHECKING:
    from runflat.elastic.power_setting import PowerSetting

CALIBRATE = """Measure the curve of speed against power of a training job.

runflat power calibrate [CONFIG.toml] [flags of runflat train] trains as `runflat train` does, and lowers the limits of
all devices from nominal, level by level; nothing is raised, and at the end, however it comes, limits are nominal. Where
devices tell their clock, the part of a step that does not scale with it (memory, waiting, network) is taken out. The
curve goes into a file that --power.curve takes. Real devices need runflat power-agent (--power.agent SOCKET), with a
floor_w below nominal in its limits file.

Example: runflat power calibrate --devices emulated --device.rate-tflops 2e-4 --device.min-power 0.7 --train.steps 200
"""


@dataclass(frozen=True)
class CalibrateArgs:
    """What to measure; all other flags are those of runflat train."""

    out: Path = Path("power-curve.json")
    """File of the curve."""
    levels: int = 4
    """Limits to measure, nominal among them."""
    lowest: float = 0.75
    """The lowest limit over nominal; not below what the site allows."""
    level_steps: int = 20
    """Steps to measure at each limit."""
    dry_run: bool = False
    """Say which limits would be set; train nothing, set nothing."""
    json: bool = False
    """The result as one JSON object; what training says goes to stderr."""

    def check(self) -> None:
        """Whether the numbers make sense.

        Raises:
            ConfigError: one does not; says which.
        """
        for name, value, least in (("levels", self.levels, 2), ("level-steps", self.level_steps, 3)):
            if value < least:
                raise ConfigError(f"--{name} is {value}; the least that tells anything is {least}.")
        if not 0.1 <= self.lowest < 1:
            raise ConfigError(f"--lowest is {self.lowest:g}; it is a part of the nominal limit, from 0.1 to below 1.")

    @property
    def num_steps(self) -> int:
        """Steps that it takes, with some to spare for reading limits back."""
        return WARM_UP_STEPS + self.levels * (self.level_steps + 2 * SETTLE_STEPS)


def calibrate(argv: list[str]) -> int:
    """Exit status of `runflat power calibrate` with these arguments.

    Raises:
        UserError: the job, the devices or the numbers do not fit, or power makes no difference.
        RunError: it could not be finished.
    """
    args, rest = tyro.cli(
        CalibrateArgs, args=argv, prog="runflat power calibrate", description=CALIBRATE, return_unknown_args=True
    )
    args.check()
    config = parse(rest)
    if config.boost or config.power.save:
        raise ConfigError("a calibration moves the limits by itself: leave boost and power.save out.")
    num_steps = config.train.end
    if num_steps < args.num_steps:
        raise ConfigError(
            f"the run would end after {num_steps} steps, but {args.levels} levels of {args.level_steps} steps take "
            f"{args.num_steps}: raise --train.steps, or lower --levels or --level-steps."
        )
    with tempfile.TemporaryDirectory() as folder:  # nothing of this look is kept
        setting = calibration_setting(config, config.layout.places, Path(folder))
    limits_w = levels_w(setting.limits.nominal_w, setting.min_w, args.levels, args.lowest)
    if args.dry_run:
        return _say_what_would_be(args, config, limits_w)
    walk = Walk(setting.rules, args.levels, args.lowest, args.level_steps)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code, summary = train(config, walk=walk)
    if len(walk.progress.levels) < args.levels:
        why = walk.progress.problem or "the run was stopped"
        raise RunError(f"not all levels were measured, so there is no curve: {why}. The limits are nominal again.")
    found = fit(walk.progress.levels, setting.limits.tdp_w, args.out.stem, _source(config, summary, args))
    args.out.write_text(json.dumps(_record(found, walk.progress.levels), indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps({**_record(found, walk.progress.levels), "file": str(args.out)}, indent=2))
    else:
        print("\n".join(_lines(found, walk.progress.levels, setting, args.out)))
    return 0


def _say_what_would_be(args: CalibrateArgs, config: TrainConfig, limits_w: tuple[float, ...]) -> int:
    num_devices = config.layout.num_devices
    if args.json:
        plan = {"limits_w": limits_w, "num_devices": num_devices, "level_steps": args.level_steps, "dry_run": True}
        print(json.dumps(plan, indent=2))
        return 0
    listed = ", ".join(f"{limit_w:.0f} W" for limit_w in limits_w)
    print(f"dry run: {num_devices} devices would be set to {listed}, for {args.level_steps} measured steps each,")
    print(f"{args.num_steps} steps in all, and back to {limits_w[0]:.0f} W. Nothing is set.")
    return 0


def _source(config: TrainConfig, summary: dict[str, Any], args: CalibrateArgs) -> str:
    """Who measured what, when, for the curve's file."""
    layout, kind = config.layout, "emulated" if config.devices == "emulated" else "real"
    return (
        f"runflat power calibrate, {time.strftime('%Y-%m-%d')}: {summary['num_params'] / 1e6:.2f} M parameters, TP "
        f"{layout.tp} x {layout.replicas}, {config.train.global_batch} sequences of {config.data.seq_len} tokens, "
        f"{args.level_steps} steps at each of {args.levels} limits, {kind} devices"
    )


def _record(found: Fit, levels: tuple[Level, ...]) -> dict[str, Any]:
    """The curve's file: what `read_curve` reads, and beside it what it was made of."""
    split = {"compute_s": found.compute_s, "fixed_s": found.fixed_s, "error": found.error, "by_clock": found.by_clock}
    return {**curve_to_json(found.curve), "fit": split, "levels": [asdict(level) for level in levels]}


def _lines(found: Fit, levels: tuple[Level, ...], setting: PowerSetting, out: Path) -> list[str]:
    whole_s = found.compute_s + found.fixed_s
    lines = [f"  {'limit':>8} {'step':>9} {'spread':>9} {'clock':>9} {'speed':>7}"]
    for level in levels:
        clock = "-" if level.clock_mhz is None else f"{level.clock_mhz:.0f} MHz"
        speed = found.curve.ratio(level.limit_w / setting.limits.tdp_w, levels[0].limit_w / setting.limits.tdp_w)
        lines.append(
            f"  {level.limit_w:>6.0f} W {level.own_s:>7.4f} s {level.spread_s:>7.4f} s {clock:>9} {speed:>7.3f}"
        )
    if found.by_clock:
        lines.append(
            f"{found.compute_s:.4f} s of a step scale with the clock, {found.fixed_s:.4f} s "
            f"({found.fixed_s / whole_s:.0%}) do not; no level is further than {found.error:.1%} from that."
        )
    else:
        lines.append("The devices do not tell a clock that moves: all of a step is taken to scale with it.")
    top = found.curve.power_for(8 / 7, levels[0].limit_w / setting.limits.tdp_w) * setting.limits.tdp_w
    lines.append(
        f"By its last slope 1 of 8 would take {top / levels[0].limit_w:.2f}x power to hide: above nominal nothing was "
        f"measured."
    )
    lines.append(f"curve: {out} (runflat train ... --boost --power.curve {out})")
    return lines
