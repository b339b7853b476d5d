"""What the controller says to workers: orders as JSON objects, checked on arrival, never pickled.

Words used here, in the messages and in the protocol:

    generation    number of a plan; only the controller gives numbers out, each once, rising
    incarnation   how often a device's process has been started; what an older one says is dropped
    committed     number of committed steps, so the next step to run has this index
    holds         generation of the plan whose units a device has complete; -1 for none
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from runflat.errors import RunError
from runflat.plan.sharded_state import Origin


class Wire(BaseModel):
    """A JSON object that is checked on arrival: unknown or missing fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @cached_property
    def _text(self) -> bytes:
        return json.dumps(self.model_dump(mode="python", by_alias=True)).encode()

    def encode(self) -> bytes:
        """The JSON text that goes over the wire; made once, since an order may go to thousands."""
        return self._text


class Move(Wire):
    """Units start..stop-1 of `kind` go from `source` to `target`: `num_bytes` over all parameters and moments."""

    kind: str
    start: int
    stop: int
    source: str
    target: str
    num_bytes: int = 0


class Origins(Wire):
    """Sharded optimizer state: what each device has, and the plans that this names, as `Plan.to_wire` writes them.

    All devices work out what moves from it, by the same function.
    """

    of: dict[str, tuple[Origin, ...]]
    plans: tuple[str, ...]


class Resume(Wire):
    """How a plan is taken up. Everybody stands at `committed` afterwards.

    start        fresh weights, or those of the checkpoint on disk
    forward      those at committed-1 hold complete gradients and apply that step with `scalars`; the others wait
    discard      the step in flight is dropped; all are at `committed`
    checkpoint   all load `checkpoint` from disk
    memory       all take the copies in memory of step `committed`; `transfers` go out of such copies

    `transfers` run after the groups are formed. A target that holds nothing gets the replicated parameters too, from
    the source of its first transfer. The bits of `healed` devices were wrong: `transfers` bring them the right ones,
    and they learn their scalars anew. Where optimizer state is sharded, `origins` stand in place of `transfers`;
    `wrong` are then the units whose weights are not to be used, by device.
    """

    action: Literal["start", "forward", "discard", "checkpoint", "memory"]
    committed: int
    scalars: tuple[float, ...] | None = None
    checkpoint: str | None = None
    transfers: tuple[Move, ...] = ()
    healed: tuple[str, ...] = ()
    origins: Origins | None = None
    wrong: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    stop: bool = False
    """The run is to end without a further step: save and be done."""

    @property
    def back(self) -> bool:
        """Whether everybody's state comes from elsewhere than what it has now."""
        return self.action in ("start", "checkpoint", "memory")


class Abort(Wire):
    """Leave every generation below `generation` now, then send `status` with this number."""

    type: Literal["abort"] = "abort"
    generation: int


class PlanOrder(Wire):
    """Adopt this plan next: roll forward or discard as `resume` says, then send `ready` (or `lowmem`)."""

    type: Literal["plan"] = "plan"
    generation: int
    plan: str
    resume: Resume
    network: dict[str, Any] | None = None


class Go(Wire):
    """All are ready: form the groups, prove them, run the transfers, compare digests, train on."""

    type: Literal["go"] = "go"
    generation: int


class Prepare(Wire):
    """Form the groups of the plan on a side thread while training goes on; answer `prepared`.

    A device that the plan leaves out gets this too: it has nothing to form and answers at once.
    """

    type: Literal["prepare"] = "prepare"
    generation: int
    plan: str


class Unprepare(Wire):
    """Forget the generation that was prepared; a newcomer stops receiving and waits for another `receive`."""

    type: Literal["unprepare"] = "unprepare"
    generation: int


class Switch(Wire):
    """Go over to the prepared generation after the commit of the step in flight; answer `switched`.

    `transfers` are units that devices which train already owe each other (a device that leaves makes some): they run
    at the boundary, in the new groups. A device that the plan leaves out answers, stops and waits for `exit`. Where
    optimizer state is sharded, `origins` stand in their place, and newcomers get all that they need there.
    """

    type: Literal["switch"] = "switch"
    generation: int
    transfers: tuple[Move, ...] = ()
    origins: Origins | None = None


class Feed(Wire):
    """Stream these units to a newcomer under compute, and each later step's changes to them.

    `replicated`: this source also streams the parameters that every device holds.
    """

    type: Literal["feed"] = "feed"
    generation: int
    target: str
    address: tuple[str, int]
    token: str
    transfers: tuple[Move, ...]
    replicated: bool = False


class Unfeed(Wire):
    """Stop streaming to this newcomer."""

    type: Literal["unfeed"] = "unfeed"
    target: str


class Receive(Wire):
    """Newcomer: listen for feeds of this plan, answer `listening`."""

    type: Literal["receive"] = "receive"
    generation: int
    plan: str
    token: str


class Inject(Wire):
    """A fault on purpose, put into a running job: it strikes at the first moment of its phase from its step on."""

    type: Literal["inject"] = "inject"
    event: dict[str, Any]


class Power(Wire):
    """Emulated devices: the power limit in force from now on, and how many times as fast it is as the nominal one."""

    type: Literal["power"] = "power"
    limit_w: float
    speed: float = Field(gt=0)


class Stop(Wire):
    """End after the step in flight, save, send `done`, and wait for `exit`."""

    type: Literal["stop"] = "stop"


class Exit(Wire):
    """Leave now with exit code 0."""

    type: Literal["exit"] = "exit"


Order = Power | Abort | PlanOrder | Go | Prepare | Unprepare | Switch | Feed | Unfeed | Receive | Inject | Stop | Exit


_ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="type")])
_T = TypeVar("_T")


def parse_order(text: bytes) -> Order:
    """The order that the controller sent.

    Raises:
        RunError: it is none of the orders above; shows the text.
    """
    return parsed(_ORDERS, text, "the controller sent")


def parsed(adapter: TypeAdapter[_T], text: bytes, who: str) -> _T:
    """What `text` says.

    Raises:
        RunError: it says nothing that `adapter` knows; names the sender and shows the text.
    """
    try:
        return adapter.validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
    except (ValueError, RecursionError) as error:  # not JSON, not text, or nested without end
        reason = str(error)
    raise RunError(f"{who} what is no message of this version ({reason}): {text[:200]!r}.")
