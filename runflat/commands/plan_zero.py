"""What `runflat plan` and the first lines of a run say of sharded optimizer state (`zero1`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from runflat.plan.plan import Place, Plan
from runflat.plan.sharded_state import Origin, ShardedState
from runflat.plan.sync_groups import Members
from runflat.plan.units import MOMENTS, ModelSpec
from runflat.plan.zero import Ownership

Size = Callable[[float], str]


@dataclass(frozen=True)
class Exposed:
    """Moments of units of `holders` that one fault may take whole: nobody mirrors them, or the mirror is too near."""

    why: Literal["no mirror", "same domain"]
    holders: Members
    num_bytes: int


@dataclass(frozen=True)
class PairMove:
    """All that one device sends another."""

    source: str
    target: str
    num_bytes: int


@dataclass(frozen=True)
class ZeroReport:
    """Sharded optimizer state of a plan. `knows_domains`: whether it is known which devices go together."""

    owned: Ownership
    exposed: tuple[Exposed, ...]
    knows_domains: bool


def zero_report(owned: Ownership, plan: Plan, element_bytes: int) -> ZeroReport:
    """What one fault may take of `owned`, under `plan` and the domains that it knows."""
    width = len(MOMENTS) * element_bytes
    domain_of = {place: plan.domain(plan.device(place)) for place in plan.places}
    found = [Exposed("no mirror", holders, numel * width) for holders, numel in owned.without_mirror.items()]
    if all(domain_of.values()):
        named: Mapping[Place, str] = {place: domain or "" for place, domain in domain_of.items()}
        found += [Exposed("same domain", holders, numel * width) for holders, numel in owned.beside(named).items()]
    return ZeroReport(owned, tuple(sorted(found, key=lambda e: (e.why, e.holders))), all(domain_of.values()))


def fallback_lines(report: ZeroReport, size: Size) -> list[str]:
    """What happens to optimizer state when devices are lost, in words; sizes as `size` writes them."""
    lines = []
    back = "the run then goes back to a copy in memory (train.memory_every) or, without one, to the newest checkpoint"
    alone, near = (
        [exposed for exposed in report.exposed if exposed.why == why] for why in ("no mirror", "same domain")
    )
    if alone:
        lines.append(
            f"zero1: moments of {_size(alone, size)} have no mirror, for only one replica has these units. With their "
            f"owner they are gone: {back}."
        )
    if near:
        lines.append(
            f"zero1: moments of {_size(near, size)} have owner and mirror in one domain. If that goes as a whole, they "
            f"are gone too: {back}."
        )
    if not lines:
        apart = " and another domain" if report.knows_domains else ""
        unknown = "" if report.knows_domains else " Which devices go together is not known here: --domain-size says so."
        lines.append(f"zero1: all moments have a mirror in another replica{apart}.{unknown}")
    return lines


def _size(exposed: Sequence[Exposed], size: Size) -> str:
    num = len(exposed)
    return f"{size(sum(e.num_bytes for e in exposed))} MiB in {num} sync group{'s' if num > 1 else ''}"


def pair_moves(
    spec: ModelSpec, old: Plan, new: Plan, ownership_of: Callable[[Plan], Ownership], element_bytes: int
) -> tuple[tuple[PairMove, ...], dict[str, tuple[int, ...]]]:
    """What moves from one plan to the other with sharded optimizer state, and the units of which something is lost."""
    state = ShardedState(spec, element_bytes, ownership_of)
    origins = {device: [Origin(device, old.generation)] for device in new.devices if old.place(device) is not None}
    found = state.moves(origins, {old.generation: old}, new)
    sent: Counter[tuple[str, str]] = Counter()
    for move in found.moves:
        sent[move.source, move.target] += move.num_bytes
    lost: dict[str, set[int]] = {}
    for _, _, kind, unit in found.lost:
        lost.setdefault(kind, set()).add(unit)
    moves = tuple(PairMove(*pair, num_bytes) for pair, num_bytes in sent.items())
    return moves, {kind: tuple(sorted(units)) for kind, units in lost.items()}


def zero_json(report: ZeroReport | None, plan: Plan) -> dict[str, Any]:
    """The fall-back for programs; docs/plan.md says what each key means."""
    if report is None:
        return {"mode": "replicated"}
    exposed = [
        {**asdict(found), "holders": [plan.device(place) for place in found.holders]} for found in report.exposed
    ]
    return {"mode": "zero1", "knows_domains": report.knows_domains, "exposed": exposed}


def opening_lines(owned: Ownership, plan: Plan, element_bytes: int, size: Size) -> list[str]:
    """What a run with zero1 begins with: memory and traffic of the device that has most, and what has no mirror."""
    width = len(MOMENTS) * element_bytes
    kept = max(map(owned.kept_numel, plan.places)) * width
    sent = max(owned.sent(place).total for place in plan.places) * element_bytes
    report = zero_report(owned, plan, element_bytes)
    lines = [
        f"optimizer: zero1, up to {size(kept)} MiB of moments per device, up to {size(sent)} MiB sent per device and "
        f"step for gradients and weights"
    ]
    return lines + (fallback_lines(report, size) if report.exposed else [])
