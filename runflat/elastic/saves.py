"""Which saves are complete, and which of them may still be published. Devices write at their own pace.

A save belongs to one (step, generation). Shards are written beside training, so that the last of them may be reported
when the plan has changed, the step was saved again, or the run has gone back to before that step.
"""

from __future__ import annotations

from runflat.train.checkpoint import ShardFile


class Saves:
    """Shards that have been reported, until all of one save are there."""

    def __init__(self) -> None:
        """Nothing has been reported."""
        self._shards: dict[tuple[int, int], dict[str, ShardFile]] = {}
        self._published = (-1, -1)
        self._gone = (0, -1)

    def go_back(self, step: int, generation: int) -> None:
        """The run goes on from `step` under `generation`: what older generations have saved of later steps is void.

        It must not appear while devices load an older checkpoint, which might be removed for it.
        """
        self._gone = (step, generation)
        self._forget()

    def add(self, device: str, step: int, generation: int, shard: ShardFile, num_devices: int) -> list[ShardFile]:
        """A shard is on disk. All shards of its save, by device, when this was the last of `num_devices`; else none."""
        if self._is_void(step, generation):
            return []
        shards = self._shards.setdefault((step, generation), {})
        shards[device] = shard
        if len(shards) < num_devices:
            return []
        self._published = (step, generation)
        self._forget()
        return [shards[name] for name in sorted(shards)]

    def _forget(self) -> None:
        self._shards = {key: shards for key, shards in self._shards.items() if not self._is_void(*key)}

    def _is_void(self, step: int, generation: int) -> bool:
        """Whether nobody needs the save: of a state that was given up, or older than what is published."""
        after, since = self._gone
        return (step > after and generation < since) or (
            step <= self._published[0] and generation <= self._published[1]
        )
