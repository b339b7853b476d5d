"""What a source says of its feeds while it trains on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runflat.elastic.frames import FeedError
from runflat.elastic.joining import Feeds
from runflat.elastic.orders import Feed

ORDER = Feed(generation=7, target="1:1", address=("127.0.0.1", 1), token="t", transfers=(), replicated=False)


class Feeder:
    """Stands for a feed; `error` and what `progress` says are set from outside."""

    def __init__(self, *arguments: Any, **options: Any):
        self.error: FeedError | None = None
        self.progress = SimpleNamespace(behind=False)

    def after_commit(self, *arguments: Any) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("what", ["behind", "formfail"])
def test_a_feed_that_cannot_go_on_is_reported_once(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Catches a newcomer that waits for ten time-outs because a source keeps to itself that its feed has failed."""
    monkeypatch.setattr("runflat.elastic.joining.Feeder", Feeder)
    engine: Any = SimpleNamespace(
        **dict.fromkeys(("spec", "held", "params", "optimizer")),
        progress=SimpleNamespace(step=3, optimizer_step=3),
        job=SimpleNamespace(emulated=None),
    )
    said: list[tuple[str, int]] = []
    feeds = Feeds(engine, "0:1", lambda kind, **fields: said.append((kind, fields["generation"])), lambda inode: None)
    feeds.start(ORDER)
    result: Any = SimpleNamespace(lr=0.1, skipped=False)
    feeds.after_commit(result)
    assert not said
    feeder: Any = feeds._feeders["1:1"]
    feeder.progress.behind = what == "behind"
    feeder.error = FeedError("closed") if what == "formfail" else None
    feeds.after_commit(result)
    feeds.after_commit(result)
    assert said == [(what, 7)]
