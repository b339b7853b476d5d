"""Starting processes, and the strategy `restart`: all end, and those of full replicas start again. Parts of `decide`.

From a checkpoint on disk every process ends and a new one starts, loads and goes on: what a job without any other
strategy does. From copies in memory the processes stay, since the copies live in them; only what was parked starts.
"""

from __future__ import annotations

from runflat.elastic.actions import Start, Turn
from runflat.elastic.device import Device, Standing
from runflat.elastic.orders import Exit
from runflat.elastic.state import Stage
from runflat.plan.strategies import Decision


def launch(turn: Turn, name: str, *, awaited: bool = False) -> None:
    """Start a new process for a device that has none; `awaited`: no plan is made before it is up."""
    old = turn.state.devices[name]
    fresh = Device(
        name=name,
        standing=Standing.STARTING,
        since=turn.now,
        incarnation=old.incarnation + 1,
        heard=turn.now,
        since_when=turn.now,
        failures=old.failures,
        num_losses=old.num_losses,
        scripted=old.scripted,
        healthy=old.standing is Standing.PARKED,
        awaited=awaited,
    )
    turn.set(devices=turn.state.devices.changed(fresh))
    turn.do(Start(name, fresh.incarnation))


def begin(turn: Turn, decision: Decision, *, anew: bool) -> bool:
    """Bring about the processes that `decision` needs; False if they are all there.

    Args:
        turn: the decision in the making.
        decision: who goes on.
        anew: processes that hold anything end, and start again empty.
    """
    state = turn.state
    members = [state.devices[device] for _, device in decision.devices]
    live = state.live()
    ending = [device.name for device in members if anew and device.name in live and device.holds >= 0]
    absent = [device.name for device in members if device.standing is Standing.PARKED]
    coming = [device.name for device in members if device.standing is Standing.STARTING]
    for name in coming:
        up = state.devices[name].hello
        turn.device(name, awaited=True, standing=Standing.ACTIVE if up else Standing.STARTING)
    if not ending and not absent and all(state.devices[name].hello for name in coming):
        return False
    over = [name for name in live if name not in {device.name for device in members}]
    turn.send((*ending, *over), Exit())
    for name in over:
        turn.device(name, standing=Standing.PARKED, surplus=name not in state.leaving, holds=-1)
    for name in ending:
        turn.device(name, standing=Standing.STARTING, awaited=True, ending=True, hello=False, holds=-1)
    for name in absent:
        launch(turn, name, awaited=True)
    turn.enter(Stage.START)
    turn.say(f"{len(ending) + len(absent)} processes start again: {', '.join((*ending, *absent))}")
    return True
