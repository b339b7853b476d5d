"""Moving of sharded optimizer state: each device ends with all its weights and the moments of its pieces, bit for bit.

Who keeps what is dealt here by a rule of the test's own: what moves must be right whatever that rule is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import pytest
import torch

from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.parallel.comms import Comms, CommsError
from runflat.parallel.move import NOTHING, Moved, ShardState, Slab, slab_view
from runflat.parallel.move_pieces import Layout, PieceChange, execute_piece_moves, piece_slabs
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.piece_moves import Part, PieceMove, PieceMoves, piece_moves, whole_weights
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout, holders
from runflat.plan.units import REPLICATED, TENSORS, ModelSpec, param_ranges
from runflat.plan.zero import ParamHeld

Full = Mapping[str, Mapping[str, torch.Tensor]]
NO_GROUPS = SyncLayout((), (), (), 0)
TP = 4
STEP = 7


def spec_of(model: str) -> ModelSpec:
    """Returns the geometry of a small model whose FFN and vocabulary divide by nothing."""
    config = proof_config(model, intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    return read_rules(build_meta_model(config, torch.float32), TP).spec


def plan_of(spec: ModelSpec, dead: Iterable[Place], previous: Plan | None = None, replicas: int = 3) -> Plan:
    """Returns the plan of three replicas of TP 4 without the dead places."""
    generation = previous.generation + 1 if previous else 0
    live = {place: name for place, name in live_devices(TP, replicas, ()).items() if place not in dead}
    return build_plan(spec, live, TP, 8, 16, previous, generation)


def keepers(plan: Plan, places: tuple[Place, ...], turn: int) -> set[str]:
    """Returns an owner among `places`, and a mirror in another replica if there is one."""
    owner = places[turn % len(places)]
    others = [place for place in places if place[0] != owner[0]]
    return {plan.device(place) for place in (owner, *others[turn % max(len(others), 1) :][:1])}


def kept_by(spec: ModelSpec, plan: Plan, device: str) -> ParamHeld:
    """Returns whose moments `device` keeps: dealt by parameter, kind and unit."""
    held = holders(spec, plan)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for param in spec.params:
        salt = zlib.crc32(param.name.encode())
        for kind in param.kinds:
            units = {0: plan.places} if kind == REPLICATED else held[kind]
            mine = [unit for unit, places in units.items() if device in keepers(plan, places, salt + unit)]
            found.setdefault(param.name, {})[kind] = tuple(sorted(mine))
    return found


def layout_of(spec: ModelSpec, plan: Plan, device: str) -> Layout:
    """Returns how the state of `device` lies under `plan`."""
    return Layout(plan.held(spec.kinds, device), kept_by(spec, plan, device))


def part_of(spec: ModelSpec, plan: Plan, device: str, gathered: bool = True) -> Part:
    """Returns what is valid on `device`: before the all-gather of a step only the pieces that it keeps."""
    kept = kept_by(spec, plan, device)
    return Part(whole_weights(spec, plan, device) if gathered else kept, kept)


def full_state(spec: ModelSpec) -> Full:
    """Returns random full tensors of each kind, by name."""
    generator = torch.Generator().manual_seed(0)
    return {kind: {p.name: torch.randn(p.shape, generator=generator) for p in spec.params} for kind in TENSORS}


def state_of(spec: ModelSpec, plan: Plan, device: str, full: Full, gathered: bool = True) -> ShardState:
    """Returns the state of `device` under `plan`; weights that are not valid there are not numbers."""
    layout, part = layout_of(spec, plan, device), part_of(spec, plan, device, gathered)
    tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
    for param in spec.params:
        for kind in TENSORS:
            if layout.has(kind, param):
                ranges = param_ranges(spec, param, layout.of(kind, param))
                tensors[kind][param.name] = cut(full[kind][param.name], param, ranges).clone()
        if not gathered:
            weight = tensors["weight"][param.name]
            right = weight.clone()
            weight.fill_(torch.nan)
            for kind, units in part.weight[param.name].items():
                for unit in units:
                    for slab in piece_slabs(param, kind, unit, unit + 1):
                        view = slab_view(spec, param, slab, layout.held, weight)
                        view.copy_(slab_view(spec, param, slab, layout.held, right))
    return ShardState(tensors, STEP)


def moves_of(spec: ModelSpec, old: Plan, new: Plan, gathered: bool) -> PieceMoves:
    """Returns what moves, as every device works it out."""
    have = {name: part_of(spec, old, name, gathered) for name in new.devices if old.place(name)}
    return piece_moves(spec, have, {name: part_of(spec, new, name) for name in new.devices}, new, 4)


def run(
    spec: ModelSpec, old: Plan, new: Plan, moves: tuple[PieceMove, ...], full: Full, gathered: bool
) -> dict[str, Moved]:
    """Returns what each device of the new plan has after the exchange."""

    def rank(place: Place, comms: Comms) -> Moved:
        device = new.device(place)
        state = state_of(spec, old, device, full, gathered) if old.place(device) else NOTHING
        layouts = layout_of(spec, old, device), layout_of(spec, new, device)
        change = PieceChange(spec, moves, new.devices, device, *layouts, torch.float32, torch.device("cpu"))
        return execute_piece_moves(change, state, comms, 1 << 16)

    found = run_ranks(new, NO_GROUPS, rank, in_memory=True)
    return {new.device(place): moved for place, moved in found.items()}


CHANGES = {
    "a loss": ((), ((1, 2),)),
    "a return": (((1, 2),), ()),
    "another loss": (((1, 2),), ((1, 2), (2, 2))),
    "a replica": ((), ((1, 0), (1, 1), (1, 2), (1, 3))),
    "nothing": ((), ()),
}


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("model", ["phi3", "llama-gqa4"])
def test_every_device_gets_its_state(model: str, name: str, gathered: bool) -> None:
    """Catches moments in the wrong order, weights taken from who has not gathered them, and bytes that are off."""
    spec = spec_of(model)
    before, after = CHANGES[name]
    old = plan_of(spec, before)
    new = plan_of(spec, after, old)
    full = full_state(spec)
    moves = moves_of(spec, old, new, gathered)
    assert not moves.lost
    found = run(spec, old, new, moves.moves, full, gathered)
    for device, moved in found.items():
        expected = state_of(spec, new, device, full)
        assert moved.state.optimizer_step == STEP
        assert moved.received_bytes == sum(move.num_bytes for move in moves.moves if move.target == device)
        for kind in TENSORS:
            assert list(moved.state.tensors[kind]) == list(expected.tensors[kind])
            for param, tensor in expected.tensors[kind].items():
                assert torch.equal(moved.state.tensors[kind][param], tensor), (device, kind, param)
    if name == "nothing" and gathered:
        assert not moves.moves


def test_what_owner_and_mirror_held_is_lost_with_both() -> None:
    """Catches moments that are taken from a device that never kept them."""
    spec = spec_of("llama-gqa4")
    old = plan_of(spec, ())
    new = plan_of(spec, ((0, 2), (1, 2)), old)
    lost = moves_of(spec, old, new, True).lost
    assert lost
    assert {what for what, *_ in lost} == {"moments"}
    survivors = [part_of(spec, old, name) for name in new.devices]
    assert not any(unit in part.moments[param][kind] for part in survivors for _, param, kind, unit in lost)


def test_a_device_of_another_step_is_named() -> None:
    """Catches moments of two steps in one state."""
    spec = spec_of("llama-gqa4")
    old = plan_of(spec, ())
    new = plan_of(spec, ((1, 2),), old)
    moves, full = moves_of(spec, old, new, True).moves, full_state(spec)
    source = moves[0].source

    def rank(place: Place, comms: Comms) -> None:
        device = new.device(place)
        state = state_of(spec, old, device, full)
        if device == source:
            state = ShardState(state.tensors, STEP + 1)
        layouts = layout_of(spec, old, device), layout_of(spec, new, device)
        change = PieceChange(spec, moves, new.devices, device, *layouts, torch.float32, torch.device("cpu"))
        execute_piece_moves(change, state, comms)

    with pytest.raises(CommsError, match=f"{source} sent to .* is of optimizer step {STEP + 1}, not of {STEP}"):
        run_ranks(new, NO_GROUPS, rank, in_memory=True)


def test_a_slab_is_one_per_segment_of_its_kind() -> None:
    """Catches a fused gate_up of which only the gate moves."""
    spec = spec_of("phi3")
    fused = next(
        param for param in spec.params if len({segment.kind for segment in param.segments}) == 1 < len(param.segments)
    )
    kind = fused.segments[0].kind
    assert piece_slabs(fused, kind, 2, 4) == (Slab(fused.name, 0, 2, 4), Slab(fused.name, 1, 2, 4))
