"""What the controller and `runflat worker` say to each other beside what they pass on: JSON, checked on arrival.

A frame between them begins with one byte: `PASSED` for what a worker process and the controller say to each other, as
it is, `OWN` for the words below.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from runflat.elastic.orders import Wire, parsed

PASSED = b"w"
OWN = b"o"


class Caller(Wire):
    """The first words of `runflat worker`: who it is, and where its process can be reached by others."""

    version: str
    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    node: str
    host: str


class Launch(Wire):
    """Controller: start a worker process for `device`, which finds the store at our address and this port."""

    type: Literal["launch"] = "launch"
    device: str
    incarnation: int
    job: str
    store_port: int


class Signal(Wire):
    """Controller: send this signal to the worker process."""

    type: Literal["signal"] = "signal"
    number: int = Field(ge=1, le=64)


class Later(Wire):
    """Controller: there is no place for you now; call again in a while."""

    type: Literal["later"] = "later"
    text: str


class Over(Wire):
    """Controller: the run has ended; so may you."""

    type: Literal["over"] = "over"


class Ended(Wire):
    """Worker: the process of this incarnation has ended; all that it said was passed on."""

    type: Literal["ended"] = "ended"
    incarnation: int
    code: int | None


class StartChild(Wire):
    """What `runflat worker` says first to the worker process that it has started.

    `store` is where the process groups meet, `host` our address for other workers, `index` our number on this machine.
    """

    device: str
    incarnation: int
    job: str
    store: tuple[str, int]
    host: str
    index: int


Word = Launch | Signal | Later | Over | Ended
_WORDS: TypeAdapter[Word] = TypeAdapter(Annotated[Word, Field(discriminator="type")])
_CALLERS: TypeAdapter[Caller] = TypeAdapter(Caller)


def parse_caller(text: bytes, address: str) -> Caller:
    """Who has called.

    Raises:
        RunError: it says nothing that we understand.
    """
    return parsed(_CALLERS, text, f"the worker at {address} says of itself")


def parse_word(text: bytes, who: str) -> Word:
    """The word that `who` sent.

    Raises:
        RunError: it is none of those above.
    """
    return parsed(_WORDS, text, f"{who} sent")
