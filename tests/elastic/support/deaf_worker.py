"""A worker process that closes its channel and does not end."""

import threading
from multiprocessing.connection import Connection


def deaf_worker(channel: Connection, *_: object) -> None:
    """Hangs up, and stays for longer than anybody waits."""
    channel.close()
    threading.Event().wait(600)
