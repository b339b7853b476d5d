"""Worker processes that close their channel and do not end, and one that only says hello."""

import json
import threading
from multiprocessing.connection import Connection

LONG_S = 600.0


def deaf_worker(channel: Connection, job: str, device: str, incarnation: int, *_: object) -> None:
    """Hangs up, and stays for longer than anybody waits; device 0:1 says hello instead, and stays too."""
    if device == "0:1":
        channel.send_bytes(json.dumps({"type": "hello", "pid": 1, "incarnation": incarnation}).encode())
    else:
        channel.close()
    threading.Event().wait(LONG_S)
