"""Which chain, how many spares, how much power headroom: the answer in words, with what it is worth and how sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from runflat.plan.batch import BatchRule
from runflat.plan.strategies import Strategy
from runflat.sim.config import SimConfig, parse_candidate
from runflat.sim.experiment import CandidateResult, run_all
from runflat.sim.spares import SpareNeed, spare_domains_for
from runflat.sim.sweep import Axis, varied
from runflat.sim.tables import columns, percent

MONTH_H = 730.0
"""Hours of a month."""

CHAINS = ("restart", "spare,restart", "drop,restart", "ntp,drop,restart", "spare,ntp,drop,restart")
"""Chains that are compared; the first is what a job without any of this does."""

SHIFTS: tuple[tuple[str, Axis, float], ...] = (
    ("half the failures", "rate", 0.5),
    ("twice the failures", "rate", 2.0),
    ("repairs in half the time", "repair", 0.5),
    ("repairs in twice the time", "repair", 2.0),
)
"""What is changed to see whether the advice would change."""


EXPONENTS = (0.25, 1 / 3, 0.65)
"""Slopes of speed against power that are tried: published ones lie between 0.13 and 0.7."""

HEADROOMS = (1.0, 1.05, 1.1, 1.2, 1.3)
"""Maximum over nominal power that is tried."""

NO_PAUSE = 0.95
"""Probability of a draw without a pause for which a capped job's spares are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One set-up that was tried."""

    chain: str
    spare_domains: int
    result: CandidateResult
    lost_h: float
    """Device-hours a month that did not become committed tokens, spares counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What would be best if something were otherwise."""

    words: str
    """What was changed."""
    chain: str
    spare_domains: int
    same: bool
    """Whether the advice given is then as good, but for chance."""


def as_good(first: Option, second: Option) -> bool:
    """Whether two options cannot be told apart: their goodput differs by at most two standard errors.

    Both are taken as independent, which errs on the side of doubt where they met the same failures.
    """
    one, two = first.result.goodput, second.result.goodput
    return abs(one.mean - two.mean) <= 2 * float((one.error**2 + two.error**2) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer."""

    best: Option
    options: tuple[Option, ...]
    """Best first."""
    baseline: Option
    """Restarting, with the spares that the question has."""
    boost_h: float | None
    """Device-hours a month that the power headroom is worth; None without power in the question."""
    headrooms: tuple[tuple[float, tuple[float, ...]], ...]
    """(maximum over nominal power, goodput without spares at each of :data:`EXPONENTS`); empty without power."""
    shifts: tuple[Shift, ...]

    no_pause: SpareNeed | None
    """Capped: spare domains of the best chain for :data:`NO_PAUSE`."""

    @property
    def rivals(self) -> tuple[Option, ...]:
        """Options that chance alone does not tell from the best."""
        return tuple(option for option in self.options[1:] if as_good(option, self.best))

    @property
    def saved_h(self) -> float:
        """Device-hours a month that the best option saves against the baseline."""
        return self.baseline.lost_h - self.best.lost_h

    @property
    def saved_error_h(self) -> float:
        """Standard error of :attr:`saved_h` over draws, taking both results as independent (so too large)."""
        first, second = (
            option.result.num_devices * MONTH_H * option.result.goodput.error for option in (self.best, self.baseline)
        )
        return float((first**2 + second**2) ** 0.5)

    def to_json(self) -> dict[str, object]:
        """The answer as a result file."""
        rows = [
            {
                "chain": option.chain,
                "spare_domains": option.spare_domains,
                "goodput": option.result.goodput.mean,
                "goodput_error": option.result.goodput.error,
                "lost_device_h_per_month": option.lost_h,
            }
            for option in self.options
        ]
        return {
            "best": rows[0],
            "options": rows,
            "saved_device_h_per_month": self.saved_h,
            "saved_error_device_h": self.saved_error_h,
            "boost_device_h_per_month": self.boost_h,
            "headroom": [
                {"headroom": headroom, "goodput": dict(zip(map(str, EXPONENTS), goodputs, strict=True))}
                for headroom, goodputs in self.headrooms
            ],
            "spare_domains_without_pause": self.no_pause and asdict(self.no_pause),
            "shifts": [asdict(shift) for shift in self.shifts],
        }


def _spare_counts(config: SimConfig) -> list[int]:
    """Numbers of spare domains worth a try: none, what the question has, and about 0.5, 1, 2 and 4 % of the job's."""
    domains = config.topology.num_job_domains
    return sorted(
        {0, config.cluster.spare_domains, *(max(round(domains * share), 1) for share in (0.005, 0.01, 0.02, 0.04))}
    )


def _with_spares(config: SimConfig, spare_domains: int, chains: Sequence[str]) -> SimConfig:
    cluster = config.cluster.model_copy(update={"spare_domains": spare_domains})
    return config.model_copy(update={"cluster": cluster, "strategies": tuple(chains)})


def _options(config: SimConfig, boost: bool) -> list[Option]:
    """Each chain without spares, and those that use spares at each count; best first."""
    found: list[Option] = []
    topology = config.topology
    others = topology.num_spare_devices > 0 or topology.domain_size % topology.tp_full > 0
    for count in _spare_counts(config):
        chains = [
            chain.replace("ntp", "ntp+boost") if boost else chain
            for chain in CHAINS
            if (Strategy.SPARE in parse_candidate(chain)[0] and (count > 0 or others))
            or (Strategy.SPARE not in parse_candidate(chain)[0] and count == 0)
        ]
        if count == config.cluster.spare_domains and count:
            chains.append("restart")
        for result in run_all(_with_spares(config, count, chains), record=False):
            lost_h = result.num_devices * MONTH_H * (1 - result.goodput.mean)
            found.append(Option(chain=result.candidate, spare_domains=count, result=result, lost_h=lost_h))
    return sorted(found, key=lambda option: (-option.result.goodput.mean, option.chain))


def advise(config: SimConfig) -> Advice:
    """The advice for a question; its own list of strategies is not used."""
    options = _options(config, boost=config.power is not None)
    baseline = next(
        option
        for option in options
        if option.chain == "restart" and option.spare_domains in (config.cluster.spare_domains, 0)
    )
    best = options[0]
    boost_h = None
    if config.power is not None:
        plain = best.chain.replace("+boost", "")
        (without,) = run_all(_with_spares(config, best.spare_domains, (plain,)), record=False)
        boost_h = (best.result.goodput.mean - without.goodput.mean) * best.result.num_devices * MONTH_H
    fewer = config.model_copy(update={"seeds": max(config.seeds // 3, 2)})
    shifts = []
    if config.failures is not None:
        for words, axis, factor in SHIFTS:
            there = _options(varied(fewer, axis, factor), boost=config.power is not None)
            ours = next(o for o in there if (o.chain, o.spare_domains) == (best.chain, best.spare_domains))
            same = as_good(ours, there[0])
            shifts.append(Shift(words=words, chain=there[0].chain, spare_domains=there[0].spare_domains, same=same))
    need = None
    if config.rule is BatchRule.CAPPED:
        need = spare_domains_for(config, options[0].chain, NO_PAUSE)
    return Advice(
        best=options[0],
        options=tuple(options),
        baseline=baseline,
        boost_h=boost_h,
        headrooms=_headrooms(fewer, options),
        shifts=tuple(shifts),
        no_pause=need,
    )


def _headrooms(config: SimConfig, options: Sequence[Option]) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Goodput of the best boosted chain without spares, by headroom and slope of the power curve."""
    if config.power is None:
        return ()
    chain = next(option.chain for option in options if option.chain.startswith("ntp"))
    found = []
    for headroom in HEADROOMS:
        row = []
        for exponent in EXPONENTS:
            update = {"curve": f"exponent:{exponent}", "points": (), "max_w": config.power.nominal_w * headroom}
            trial = config.model_copy(update={"power": config.power.model_copy(update=update)})
            (result,) = run_all(_with_spares(trial, 0, (chain,)), record=False)
            row.append(result.goodput.mean)
        found.append((headroom, tuple(row)))
    return tuple(found)


def advice_text(config: SimConfig, advice: Advice) -> str:
    """The advice for people: what to do, what it is worth a month, how sure that is."""
    best, base = advice.best, advice.baseline
    price = config.cluster.price_per_device_h
    money = f", {advice.saved_h * price:,.0f} a month at {price:g} per device-hour" if price else ""
    lines = [
        f"Use the chain {best.chain} with {best.spare_domains} spare domain(s) of {config.cluster.domain_size}.",
        f"Goodput {percent(best.result.goodput.mean)} % against {percent(base.result.goodput.mean)} % for {base.chain} "
        f"with {base.spare_domains} spare domain(s): worth {advice.saved_h:,.0f} device-hours a month{money}.",
        f"Chance alone moves that by +-{advice.saved_error_h:,.0f} (one standard error over {config.seeds} draws).",
    ]
    if advice.boost_h is None:
        lines.append("Power: none in the question, so no boost was considered.")
    elif config.power and config.power.max_w <= config.power.nominal_w:
        lines.append("Power: nominal limit equals the maximum, so there is no headroom and boost does nothing.")
    else:
        lines.append(f"Power headroom is worth {advice.boost_h:,.0f} device-hours a month of that.")
    if advice.no_pause is not None:
        lines.append(
            f"Fixed batch: {advice.no_pause.spare_domains} spare domain(s) for {100 * NO_PAUSE:g} % of draws without a "
            f"pause ({percent(advice.no_pause.without_pause, 0)} % of {config.seeds} had none)."
        )
    if advice.rivals:
        names = "; ".join(f"{option.chain} with {option.spare_domains}" for option in advice.rivals[:4])
        lines.append(f"Within two standard errors as good: {names}. More draws (--seeds) would tell them apart.")
    for shift in advice.shifts:
        other = f"{shift.chain} with {shift.spare_domains} spare domain(s)."
        lines.append(f"With {shift.words}: " + ("the same advice." if shift.same else other))
    rows = [["chain", "spare domains", "goodput %", "+-", "device-h lost a month"]]
    rows += [
        [
            option.chain,
            str(option.spare_domains),
            percent(option.result.goodput.mean),
            percent(option.result.goodput.error),
            f"{option.lost_h:,.0f}",
        ]
        for option in advice.options
    ]
    tables = [columns(rows)]
    if advice.headrooms:
        head = ["headroom, no spares", *(f"goodput % at power^{exponent:.2f}" for exponent in EXPONENTS)]
        body = [[f"{headroom:.2f}x", *(percent(g) for g in goodputs)] for headroom, goodputs in advice.headrooms]
        tables.append(columns([head, *body]))
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables)
