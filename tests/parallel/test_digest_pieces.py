"""Digests of sharded optimizer state: owner and mirror of each piece are compared, and nobody else."""

from __future__ import annotations

import pytest
import torch

from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.parallel.comms import Comms, Network
from runflat.parallel.digest import compare, piece_digests, unit_digests, votes
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import REPLICATED, ModelSpec, param_ranges
from runflat.plan.zero import Ownership, ownership

KINDS = ("weight", "exp_avg", "exp_avg_sq")
NO_GROUPS = SyncLayout((), (), (), 0)
Pieces = dict[str, dict[str, torch.Tensor]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case() -> tuple[ModelSpec, Plan, Ownership]:
    """Returns three replicas of TP 3, one of them without a device, and who keeps what."""
    config = proof_config("phi3", intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    spec = read_rules(build_meta_model(config, torch.float32), 3).spec
    plan = build_plan(spec, live_devices(3, 3, [(1, 2)]), 3, 8, 16)
    return spec, plan, ownership(spec, plan, sync_layout(spec, plan, 1 << 20, 4))


def pieces_of(spec: ModelSpec, owned: Ownership, place: Place) -> Pieces:
    """Returns weights and moments of what `place` keeps, cut out of the same full tensors everywhere."""
    kept, found = owned.kept(place), {kind: dict[str, torch.Tensor]() for kind in KINDS}
    for number, kind in enumerate(KINDS):
        generator = torch.Generator().manual_seed(number)
        for param in spec.params:
            full = torch.randn(param.shape, generator=generator)
            if any(kept[param.name].values()):
                found[kind][param.name] = cut(full, param, param_ranges(spec, param, kept[param.name])).clone()
    return found


def differing(
    case: tuple[ModelSpec, Plan, Ownership], wrong: Place | None, kind: str = "weight", name: str = ""
) -> tuple[list[tuple[str, int]], set[Place]]:
    """Returns what all devices say differs, and who holds it, when one bit of `name` is flipped at `wrong`."""
    spec, plan, owned = case

    def rank(place: Place, comms: Comms) -> tuple[list[tuple[str, int]], set[Place]]:
        held = plan.replica(place[0]).held(spec.kinds, place[1])
        pieces = pieces_of(spec, owned, place)
        if place == wrong:
            pieces[kind][name].view(torch.int32).view(-1)[0] ^= 1
        nothing = {"weight": {p.name: torch.zeros(cut_shape(spec, p.name, held)) for p in spec.params}}
        whole = unit_digests(spec, held, nothing, (1.0,))
        digests = torch.cat([whole, piece_digests(spec, owned.kept(place), pieces, CPU)])
        found = compare(spec, digests, comms)
        columns = votes(spec, digests, found, comms) if found else {}
        return found, {holder for column in columns.values() for holder in column}

    answers = list(run_ranks(plan, NO_GROUPS, rank, lambda _: Network(), in_memory=True).values())
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def cut_shape(spec: ModelSpec, name: str, held: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of a shard."""
    param = next(param for param in spec.params if param.name == name)
    return tuple(cut(torch.empty(param.shape, device="meta"), param, param_ranges(spec, param, held)).shape)


def test_owners_and_mirrors_with_the_same_bits_agree(case: tuple[ModelSpec, Plan, Ownership]) -> None:
    """Catches a digest that depends on what else a device keeps."""
    assert differing(case, None) == ([], set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_with_owner_and_mirror(case: tuple[ModelSpec, Plan, Ownership], kind: str) -> None:
    """Catches a tensor that is left out, and a piece with the wrong name or with holders that do not keep it."""
    spec, _, owned = case
    place = (0, 1)
    for piece in owned.pieces:
        if piece.owner != place or piece.mirror is None:
            continue
        param = next(param for param in spec.params if param.name == piece.param)
        units = owned.kept(place)[param.name][param.kinds[0]]
        if param.segments and (piece.segment or piece.units[0] != units[0]):
            continue  # the first element of what it keeps is of another piece
        words = f"kept {param.name}" if param.kinds == (REPLICATED,) else f"kept {param.name} {param.kinds[0]}"
        found = differing(case, place, kind, param.name)
        assert found == ([(words, units[0])], {place, piece.mirror})
