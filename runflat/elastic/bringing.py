"""Bring a device's state to where a plan wants it, over the plan's groups."""

from __future__ import annotations

from dataclasses import replace

from runflat.elastic.orders import Origins, Resume, Switch
from runflat.parallel.comms import Comms
from runflat.parallel.move import NOTHING, Change, Moved, ShardState, execute_transfers
from runflat.parallel.move_pieces import Layout, PieceChange, execute_piece_moves
from runflat.plan.plan import Plan, plan_from_wire
from runflat.plan.sharded_state import ShardedState
from runflat.plan.transfers import Transfer
from runflat.train.engine import Engine


def bring(
    engine: Engine, device: str, old: Plan | None, plan: Plan, order: Resume | Switch, comms: Comms, *, healed: bool
) -> int:
    """Exchange what `order` says and have `engine` hold what `plan` gives `device`; returns the bytes received.

    Args:
        engine: what it holds is given by `old`, or by its own word where optimizer state is sharded.
        device: this device.
        old: the plan whose units it holds; None if it has nothing.
        plan: the plan that is taken up.
        order: what moves.
        comms: the groups of `plan`.
        healed: its own step count may be wrong.

    Raises:
        CommsError: a member was lost, or a message came damaged or from another step.
    """
    state = engine.state() if old is not None else NOTHING
    if healed:
        state = replace(state, optimizer_step=engine.progress.optimizer_step)
    held = plan.held(engine.spec.kinds, device)
    if order.origins is not None:
        moved, layout = _pieces(engine, device, state, plan, order, order.origins, comms)
        engine.adopt(held, moved.state, layout.kept)
        return moved.received_bytes
    moves = tuple(Transfer(**move.model_dump()) for move in order.transfers)
    if not moves and old is not None and old.generation == plan.generation:
        return 0
    change = Change(engine.spec, old or plan, plan, moves, device, engine.dtype, engine.device)
    moved = execute_transfers(change, state, comms)
    engine.adopt(held, moved.state)
    return moved.received_bytes


def _pieces(
    engine: Engine, device: str, state: ShardState, plan: Plan, order: Resume | Switch, origins: Origins, comms: Comms
) -> tuple[Moved, Layout]:
    """Sharded optimizer state: all devices work out what moves from who has what."""
    known = {old.generation: old for old in map(plan_from_wire, origins.plans)}
    sharded = ShardedState(engine.spec, engine.dtype.itemsize, engine.ownership)
    moves = sharded.moves(origins.of, known, plan, order.wrong if isinstance(order, Resume) else {}).moves
    before = Layout(engine.held, engine.kept) if state.tensors["weight"] else Layout({}, {})
    after = Layout(plan.held(engine.spec.kinds, device), sharded.kept(plan, device))
    change = PieceChange(engine.spec, moves, plan.devices, device, before, after, engine.dtype, engine.device)
    return execute_piece_moves(change, state, comms), after
