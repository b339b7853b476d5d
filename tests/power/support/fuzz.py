"""Callers who do everything wrong, beside one who does not: what they get is counted."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from runflat.power.client import AgentClient, read
from runflat.power.wire import MAX_MESSAGE_BYTES

REASONABLE = [
    {"type": "read"},
    {"type": "acquire", "devices": ["GPU-0", "GPU-2"], "ttl_s": 0.5, "job": "fuzz"},
    {"type": "renew", "lease": "0" * 32},
    {"type": "set", "lease": "0" * 32, "limits_w": {"GPU-0": 1100.0}, "reason": "fuzz"},
    {"type": "release", "lease": "0" * 32},
]
VALUES = [None, True, -1, 0, 1e308, -1e308, 10**400, "", "\x00", "GPU-0", "GPU-0" * 40, [], {}, ["GPU-1"], 1200.0, 5000]


def bent(rng: random.Random) -> bytes:
    """A message that may have been one."""
    message = dict(rng.choice(REASONABLE))
    for _ in range(rng.randrange(3)):
        key = rng.choice([*message, "more", "limits_w", "ttl_s", "devices", "lease"])
        message[key] = rng.choice(VALUES)
    if "limits_w" in message and rng.random() < 0.5:
        message["limits_w"] = {rng.choice(["GPU-0", "GPU-7", ""]): rng.choice(VALUES)}
    line = bytearray(json.dumps(message).encode())
    for _ in range(rng.choice([0, 0, 1, 5])):
        line[rng.randrange(len(line))] = rng.randrange(256)
    return bytes(line)


def sent(rng: random.Random) -> bytes:
    """What one caller sends over one connection."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 4096))
    if kind == 1:
        return b"x" * rng.randrange(MAX_MESSAGE_BYTES - 2, MAX_MESSAGE_BYTES + 100)
    if kind == 2:
        return bent(rng)[: rng.randrange(1, 40)]
    if kind == 3:
        return rng.choice([b"[", b'{"a":']) * rng.randrange(1, 3000) + b"\n"
    return b"".join(bent(rng) + b"\n" for _ in range(rng.randrange(1, 20)))


def call(path: Path, rng: random.Random, waiting: list[socket.socket]) -> str:
    """One caller; returns the type or error of the first answer, or `none`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(0.2)
    try:
        connection.connect(str(path))
        connection.sendall(sent(rng))
        if rng.random() < 0.2:
            waiting.append(connection)  # neither reads nor goes
            if len(waiting) > 8:
                waiting.pop(0).close()
            return "not read"
        answer = connection.recv(65_536).split(b"\n")[0]
        connection.close()
        said = json.loads(answer) if answer else {}
        return str(said.get("error", said.get("type", "none")))
    except (OSError, ValueError):
        connection.close()
        return "none"


def fuzz(path: Path, seconds: float, seed: int) -> Counter[str]:
    """What `seconds` of callers got, four at a time; a good caller's reads are `served`, or `failed: why`."""
    found: Counter[str] = Counter()
    end_s = time.monotonic() + seconds

    def strangers(number: int) -> Counter[str]:
        rng, mine = random.Random(seed * 100 + number), Counter[str]()
        waiting: list[socket.socket] = []
        while time.monotonic() < end_s:
            mine[call(path, rng, waiting)] += 1
        for connection in waiting:
            with contextlib.suppress(OSError):
                connection.close()
        return mine

    counts: list[Counter[str]] = []
    threads = [threading.Thread(target=lambda n=n: counts.append(strangers(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    client = AgentClient(path, timeout_s=20)
    while time.monotonic() < end_s:
        reply = read(client)
        found["served" if reply.type == "telemetry" else f"failed: {getattr(reply, 'error', reply.type)}"] += 1
        threading.Event().wait(0.05)
    for thread in threads:
        thread.join()
    return sum(counts, found)
