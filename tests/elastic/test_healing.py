"""From a flipped bit to the right one: digests, votes, verdict and transfer over real groups, ranks as threads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.elastic.heal import judge
from runflat.elastic.orders import Move
from runflat.elastic.planning import Planner
from runflat.parallel.comms import Comms
from runflat.parallel.digest import compare, unit_digests, votes
from runflat.parallel.move import Change, ShardState, execute_transfers
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.strategies import JobFacts
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.transfers import Transfer
from runflat.plan.units import TENSORS, ModelSpec, param_ranges

NO_GROUPS = SyncLayout((), (), (), 0)
STEP = 7
VICTIM = "1:1"


@dataclass
class Shards:
    """Three replicas of TP 2, one of them with a dead slot, that hold the same random state."""

    spec: ModelSpec
    plan: Plan
    states: dict[str, ShardState]


def shards() -> Shards:
    config = proof_config("phi3", intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    spec = read_rules(build_meta_model(config, torch.float32), 2).spec
    plan = build_plan(spec, live_devices(2, 3, [(2, 0)]), 2, 6, 16)
    generator = torch.Generator().manual_seed(0)
    full = {kind: {p.name: torch.randn(p.shape, generator=generator) for p in spec.params} for kind in TENSORS}
    states = {}
    for place in plan.places:
        held = plan.replica(place[0]).held(spec.kinds, place[1])
        tensors = {k: {p.name: cut(full[k][p.name], p, param_ranges(spec, p, held)) for p in spec.params} for k in full}
        states[plan.device(place)] = ShardState(tensors, STEP)
    return Shards(spec, plan, states)


def planner_of(spec: ModelSpec) -> Planner:
    placement = tuple(((r, slot), f"{r}:{slot}") for r in range(3) for slot in range(2))
    job = JobFacts(num_replicas=3, tp_full=2, num_sequences=6)
    return Planner(spec=spec, job=job, placement=placement, seq_len=16, bytes_per_element=12)


def look(found: Shards) -> dict[str, tuple[str, ...]]:
    """Returns who is wrong in which units, as all devices say alike."""

    def rank(place: Place, comms: Comms) -> dict[str, tuple[str, ...]]:
        device = found.plan.device(place)
        held = found.plan.replica(place[0]).held(found.spec.kinds, place[1])
        digests = unit_digests(found.spec, held, found.states[device].tensors, (STEP,))
        differ = compare(found.spec, digests, comms)
        table = votes(found.spec, digests, differ, comms)
        verdict = judge(
            {f"{kind} {unit}": {found.plan.device(p): d for p, d in of.items()} for (kind, unit), of in table.items()}
        )
        assert verdict.unclear == {}
        return dict(verdict.wrong)

    answers = list(run_ranks(found.plan, NO_GROUPS, rank, in_memory=True).values())
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def heal(found: Shards, moves: tuple[Move, ...]) -> int:
    """Moves the units; returns the bytes that were received."""
    transfers = tuple(Transfer(**move.model_dump()) for move in moves)

    def rank(place: Place, comms: Comms) -> int:
        device = found.plan.device(place)
        cpu = torch.device("cpu")
        change = Change(found.spec, found.plan, found.plan, transfers, device, torch.float32, cpu)
        moved = execute_transfers(change, found.states[device], comms)
        found.states[device] = moved.state
        return moved.received_bytes

    return sum(run_ranks(found.plan, NO_GROUPS, rank, in_memory=True).values())


def damage(found: Shards, kind: str, name: str, element: int) -> None:
    """Flips the lowest bit of one element on one device."""
    bits = found.states[VICTIM].tensors[kind][name].view(-1).view(torch.int32)
    bits[element] ^= 1


@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_wrong_is_named_and_gets_the_bits_of_the_majority(kind: str) -> None:
    """Catches a unit that is received and not installed because its device held it before, or more than it moves."""
    found, whole = shards(), shards()
    planner = planner_of(found.spec)
    for param in found.spec.params:
        damage(found, kind, param.name, 3)
        wrong = look(found)
        assert wrong.keys() == {VICTIM}, param.name
        (unit,) = wrong[VICTIM]
        assert (unit == "replicated 0") == (param.dim is None)
        planned = planner.moves(dict.fromkeys(found.states, found.plan), found.plan, wrong)
        assert planned.lost == ()
        (move,) = planned.transfers
        assert (f"{move.kind} {move.start}", move.target) == (unit, VICTIM)
        assert heal(found, planned.transfers) == move.num_bytes > 0
        for device, state in found.states.items():
            for tensors, name in ((k, p.name) for k in TENSORS for p in found.spec.params):
                assert torch.equal(state.tensors[tensors][name], whole.states[device].tensors[tensors][name]), name


def test_a_device_whose_every_unit_is_wrong_gets_them_all() -> None:
    """Catches replicated parameters that are sent twice or not at all where all else moves too."""
    found, whole = shards(), shards()
    for param in found.spec.params:
        found.states[VICTIM].tensors["weight"][param.name] += 1
    wrong = look(found)
    planned = planner_of(found.spec).moves(dict.fromkeys(found.states, found.plan), found.plan, wrong)
    assert heal(found, planned.transfers) == sum(move.num_bytes for move in planned.transfers)
    assert look(found) == {}
    for param in found.spec.params:
        healed, right = (side.states[VICTIM].tensors["weight"][param.name] for side in (found, whole))
        assert torch.equal(healed, right)
