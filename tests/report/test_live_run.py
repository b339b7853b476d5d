"""The live page and `runflat top` on a real job that loses a device, takes it back, lets it leave, and ends."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runflat.check.live import Command, Watch, until
from runflat.elastic.requests import ask

pytestmark = [
    pytest.mark.process,
    pytest.mark.needs_chromium,
    pytest.mark.needs_tmux,
    pytest.mark.timeout(300),
]

SHOWN_WITHIN_S = 2.0
TICK_S = 0.02
JOB = (
    "--model.preset tiny --layout.tp 2 --layout.replicas 2 --train.global-batch 4 --data.seq-len 16 "
    "--train.memory-every 0 --train.steps 1000000 --devices emulated --device.rate-tflops 6e-5 --page 0"
)
RECORD = """
(() => {
  window.seen = {};
  const note = (what) => { if (!(what in seen)) seen[what] = Date.now() / 1000; };
  const look = () => {
    const map = document.getElementById("v1-map");
    const lost = map.querySelectorAll(".wide rect.m-L, .wide rect.m-O").length;
    const low = map.querySelector(".wide").textContent.includes("TP 1 of 2");
    if (lost === 1) note("loss");
    if (low) note("degree");
    if ("degree" in seen && !low && map.querySelectorAll(".wide rect.m-A").length === 4) note("return");
  };
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
})()
"""
"""Notes when the page itself came to show something, on the clock that files have their times from."""


class Lateness:
    """A thread that wants to run every `TICK_S`: how late it was tells how long the machine let nobody run."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            self.ticks.append(time.time())

    def between(self, start: float, end: float) -> float:
        """Seconds lost from `start` to `end`."""
        inside = [start, *(tick for tick in self.ticks if start < tick < end), end]
        return sum(max(after - before - 2 * TICK_S, 0.0) for before, after in zip(inside, inside[1:], strict=False))

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()


@contextmanager
def started(folder: Path) -> Iterator[tuple[Command, Watch, str]]:
    """A job that trains, and the address of its page."""
    (folder / "a.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(2000)), encoding="utf-8")
    run = folder / "job"
    arguments = ["train", *JOB.split(), "--data.paths", str(folder / "a.txt"), "--run", str(run)]
    with Command(arguments, folder / "log") as command:
        until("the page", lambda: "page: http" in command.output(), 60.0)
        address = re.findall(r"page: (http://\S+)", command.output())[0]
        watch = Watch(run)
        watch.reached(3, 120.0)
        yield command, watch, address


def began(watch: Watch) -> float:
    """Wall-clock time of second 0 of the run: devices.json says a time, and was written right after it."""
    found = []
    path = watch.run / "devices.json"
    for _ in range(8):
        before = path.stat()
        job = watch.job()
        if path.stat().st_mtime_ns == before.st_mtime_ns:
            found.append(before.st_mtime - job["time_s"])
        watch.reached(watch.num_steps() + 1)
    return min(found)


def is_back(watch: Watch) -> bool:
    """Whether all four train, in a plan that is in force."""
    return all(row["state"] == "active" for row in watch.devices().values()) and watch.job().get("waiting") is None


def test_page_and_terminal_show_a_loss_and_a_return(tmp_path: Path, browser: Any, terminal: Any) -> None:
    """Catches a page that learns of a loss late or not at all, keys that reach no real job, and views that outlive it.

    What the page shows it shows within two seconds of the event; time in which the machine let nothing run is left out.
    """
    with started(tmp_path) as (command, watch, address):
        lateness = Lateness()
        browser.open(address)
        browser.eval(RECORD)
        terminal.start(watch.run, settings="NO_COLOR=1")
        shown = terminal.shows("q quit", colors=True)
        assert "replica 1    TP 2/2" in shown
        assert not re.search(r"\x1b\[[\d;]*3[0-7]m", shown)
        assert max(map(len, terminal.shows("q quit").splitlines())) <= 80
        start = began(watch)

        assert ask(watch.run, "kill", "1:1", time.sleep)[0]
        assert re.search("1:1 (lost|out)", terminal.shows("TP 1/2"))
        terminal.shows("▼")
        terminal.tmux("resize-window", "-t", "t", "-x", "60", "-y", "14")
        watch.reached(watch.num_steps() + 2)
        terminal.press("r", "1:1", "Enter", "y")
        until("1:1 to be back", lambda: is_back(watch), 120.0)
        assert "TP 1/2" not in terminal.shows("replica 1    TP 2/2")
        until("the page to show it", lambda: "return" in browser.eval("seen"))

        seen = browser.eval("seen")
        events = {
            "loss": start + watch.records("incident")[0]["started_s"],
            "degree": start + watch.records("took")[1]["time_s"],
            "return": start + watch.records("took")[2]["time_s"],
        }
        for what, at in events.items():
            late_s, lost_s = seen[what] - at, lateness.between(at, seen[what])
            print(f"{what}: shown after {late_s:.2f} s, of which the machine lost {lost_s:.2f} s")
            assert -0.1 < late_s < SHOWN_WITHIN_S + lost_s, what
        lateness.close()

        terminal.press("d", "1:1", "Enter", "y")
        assert "1:1 parked" in terminal.shows("TP 1/2")
        os.kill(command.process.pid, signal.SIGINT)
        assert command.finish(60.0) == 130
        assert "finished" in terminal.shows("code 0")
        until("the page to say so", lambda: browser.eval("document.getElementById('state').textContent") == "finished")
        assert [text for text in browser.console if "ERR_" not in text] == []
