"""A worker process that closes its channel and does not end."""

import time
from multiprocessing.connection import Connection


def deaf_worker(channel: Connection, *_: object) -> None:
    """Hangs up, and sleeps for longer than anybody waits."""
    channel.close()
    time.sleep(600)
