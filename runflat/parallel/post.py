"""Messages between devices when state moves: sealed with step count and checksum, exchanged in all-to-all rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runflat.parallel.comms import Comms, CommsError
from runflat.parallel.digest import checksum

LIMIT_BYTES = 64 << 20
"""Most that one device sends or receives in one collective; what is larger goes in rounds."""

_TRAILER_WORDS = 2  # optimizer step, checksum


def num_words(num_bytes: int) -> int:
    """Length in 64-bit words of a message with `num_bytes` of state, step count and checksum included."""
    return -(-num_bytes // 8) + _TRAILER_WORDS


def seal(words: torch.Tensor, optimizer_step: int) -> None:
    """Put step count and checksum at the end of a message."""
    words[-2] = optimizer_step
    words[-1] = checksum(words[:-1])


def unseal(source: str, target: str, words: torch.Tensor, step: int | None) -> int:
    """The step count of a message that is whole and of the step that this device is at (None: not known yet).

    Raises:
        CommsError: it came damaged, or is of another step.
    """
    way = f"the state that {source} sent to {target}"
    if checksum(words[:-1]) != int(words[-1]):
        raise CommsError(f"{way} came damaged: its checksum is not the one that was sent along.")
    sent_step = int(words[-2])
    if step is not None and sent_step != step:
        raise CommsError(f"{way} is of optimizer step {sent_step}, not of {step} as the rest.")
    return sent_step


def exchange(
    order: Sequence[str],
    lengths: Mapping[tuple[str, str], int],
    outgoing: Mapping[str, torch.Tensor],
    incoming: Mapping[str, torch.Tensor],
    torch_device: torch.device,
    comms: Comms,
    limit_bytes: int = LIMIT_BYTES,
) -> None:
    """Fill `incoming`, in as many all-to-all rounds as the longest message needs; all devices count them alike.

    Args:
        order: all devices, by rank.
        lengths: words of each message by (source, target), the same on all devices.
        outgoing: this device's messages by target.
        incoming: room for those that it gets, by source.
        torch_device: where the messages are.
        comms: the groups in force.
        limit_bytes: most that one device sends or receives in one round.

    Raises:
        CommsError: a member was lost.
    """
    ends = [end for pair in lengths for end in zip(("source", "target"), pair, strict=True)]
    most_peers = max((ends.count(end) for end in set(ends)), default=1)
    step = max(limit_bytes // 8 // most_peers, 1)
    nothing = torch.empty(0, dtype=torch.int64, device=torch_device)
    for start in range(0, max(lengths.values(), default=0), step):
        sent = [outgoing.get(peer, nothing)[start : start + step] for peer in order]
        slots = [incoming.get(peer, nothing)[start : start + step] for peer in order]
        buffer = torch.empty(sum(map(len, slots)), dtype=torch.int64, device=torch_device)
        work = comms.world.launch_all_to_all(buffer, torch.cat(sent), [*map(len, slots)], [*map(len, sent)])
        comms.wait([work], "transfer of units")
        for slot, part in zip(slots, torch.split(buffer, [*map(len, slots)]), strict=True):
            slot.copy_(part)
