"""A small run's folder, a simulation's result, a terminal (tmux), and a browser: Chromium, spoken to through a pipe."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runflat.plan.plan import Plan, ReplicaPlan

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
INCIDENT = {
    "record": "incident",
    "number": 1,
    "device": "1:1",
    "devices": ["1:1"],
    "cause": "killed by signal 9 (SIGKILL)",
    "started_s": 5.2,
    "strategy": "ntp",
    "phases_s": {"detect": 0.02, "abort": 0.01, "barrier": 0.01, "form": 0.02, "transfer": 0.03, "digest": 0.04},
    "bytes_moved": 468_480,
    "replayed_steps": 0.5,
    "generation": 1,
    "words": [],
    "stopped_s": 0.13,
    "step": 5,
    "action": "discard",
    "first_commit_s": 0.6,
}
CHANGE = {
    "record": "change",
    "time_s": 9.8,
    "generation": 2,
    "joined": ["1:1"],
    "left": [],
    "step": 9,
    "stages_s": {"feed": 0.4, "prepare": 0.6},
    "bytes_moved": 1_738_240,
    "stopped_s": 0.105,
}
DEVICE_S = {"productive": 30.0, "imbalance": 1.0, "start": 4.0, "reform": 0.5, "idle": 1.5, "failed": 3.0}


def plan(generation: int, dead: tuple[str, ...] = (), tp: int = 2, replicas: int = 2, batch: int = 8) -> Plan:
    """A plan of `replicas` with the dead devices left out; units of one kind, dealt out evenly."""
    parts = []
    for number in range(replicas):
        names = [f"{number}:{slot}" for slot in range(tp)]
        live = [slot for slot, name in enumerate(names) if name not in dead]
        held = tuple(tuple(range(live.index(slot), 4, len(live))) if slot in live else () for slot in range(tp))
        devices = tuple(name if slot in live else None for slot, name in enumerate(names))
        parts.append(ReplicaPlan(number, devices, (("head", held),), batch // replicas))
    return Plan(generation, tp, tuple(parts))


def step(number: int, time_s: float, generation: int, step_s: float = 0.5) -> dict[str, Any]:
    """A line of steps.jsonl."""
    replicas = [{"replica": r, "num_samples": 4, "compute_s": 0.4, "sync_s": 0.01} for r in range(2)]
    numbers = {"loss": 5.0 - 0.2 * number, "grad_norm": 1.0, "lr": 1e-3, "num_target_tokens": 1016, "skipped": False}
    times = {"generation": generation, "step_s": step_s, "tokens_per_s": 1024 / step_s, "time_s": time_s}
    return {"step": number, **numbers, **times, "replicas": replicas}


def lines(rows: list[dict[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def events() -> list[dict[str, Any]]:
    """A start, a loss, a return."""
    start = {"record": "plan", "generation": 0, "time_s": 2.0, "reason": "start", "action": "start", "committed": 0}
    again = {"reason": "the step runs again", "action": "discard", "committed": 5, "num_transfers": 3}
    return [
        {**start, "num_transfers": 0},
        {"record": "took", "generation": 0, "time_s": 2.1, "committed": 0},
        {"event": "kill", "device": "1:1", "step": 5, "phase": "backward", "generation": 0, "detail": "injected"},
        {"event": "fail", "device": "1:1", "time_s": 5.22, "cause": "killed by signal 9 (SIGKILL)", "generation": 0},
        {"record": "plan", "generation": 1, "time_s": 5.24, **again},
        {"record": "took", "generation": 1, "time_s": 5.33, "committed": 5},
        INCIDENT,
        {"event": "return", "device": "1:1", "time_s": 8.0},
        {"record": "took", "generation": 2, "time_s": 9.3, "committed": 9},
        CHANGE,
        {"record": "ledger", "time_s": 10.0, "device_s": DEVICE_S},
    ]


def steps() -> list[dict[str, Any]]:
    """Ten steps, with 0.63 s in which nobody trained."""
    times = [2.6, 3.1, 3.6, 4.1, 4.6, 5.93, 6.6, 7.2, 7.9, 9.8]
    return [step(number, time_s, 0 if number < 5 else 1 if number < 9 else 2) for number, time_s in enumerate(times)]


def devices(finished: bool = True, states: dict[str, str] | None = None) -> dict[str, Any]:
    """devices.json."""
    rows = []
    for name in ("0:0", "0:1", "1:0", "1:1"):
        replica, slot = map(int, name.split(":"))
        place = {"replica": replica, "slot": slot, "pid": None, "incarnation": 0, "committed": 10, "phase": "forward"}
        state = (states or {}).get(name, "active")
        more = {"waits_for": None, "failures": 0, "restart_in_s": None, "cause": ""}
        rows.append({"device": name, "state": state, **place, **more})
    head = {"controller_pid": os.getpid(), "finished": finished, "time_s": 10.0, "stage": "run", "generation": 2}
    return {**head, "step": 10, "devices": rows}


def write_run(folder: Path, *, emulated: bool = True, finished: bool = True) -> Path:
    """A run's folder, as `runflat train` leaves it."""
    (folder / "plans").mkdir(parents=True)
    for generation, dead in ((0, ()), (1, ("1:1",)), (2, ())):
        (folder / "plans" / f"generation-{generation:06d}.json").write_text(plan(generation, dead).to_json() + "\n")
    (folder / "steps.jsonl").write_text(lines(steps()))
    (folder / "events.jsonl").write_text(lines(events()))
    config = {"model": {"preset": "tiny"}, "layout": {"tp": 2, "replicas": 2}, "train": {"steps": 10, "stop_after": 0}}
    (folder / "config.json").write_text(json.dumps({**config, "devices": "emulated" if emulated else "auto"}))
    (folder / "devices.json").write_text(json.dumps(devices(finished)))
    origin = {"command": ["runflat", "train", "--run", "r"], "version": "0.1.0", "started": "2026-01-02 03:04:05"}
    (folder / "run.json").write_text(json.dumps(origin))
    if finished:
        head = {"step": 10, "loss": 3.2, "holdout_loss": 3.3, "median_step_s": 0.5, "tokens_per_s": 2048.0}
        end = {"stopped": False, "wall_s": 10.0, "goodput": 0.5, "goodput_reason": None, "healthy_step_s": 0.5}
        clock = {"billed_s": 5.0, "late_s": 0.0, "valid": True} if emulated else None
        summary = {**head, **end, "num_params": 131_520, "emulated": clock, "device_s": DEVICE_S}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def simulation(num_points: int = 40, name: str = "cluster") -> dict[str, Any]:
    """A result of `runflat simulate` with so many points in each series."""
    rows = []
    for index, candidate in enumerate(("restart", "ntp,drop,restart")):
        goodput = {"mean": 0.9 + 0.05 * index, "p5": 0.88 + 0.05 * index, "p95": 0.92 + 0.05 * index, "error": 0.01}
        times = [point * 86_400 * 90 / num_points for point in range(num_points)]
        series = {
            "time_s": times,
            "throughput": [0.9 + 0.1 * (point % 7) / 7 for point in range(num_points)],
            "live": [1 - 0.01 * (point % 5) for point in range(num_points)],
            "watts": [0.0] * num_points,
            "reduced": [(point % 5) * index for point in range(num_points)],
            "hit_groups": [point % 5 for point in range(num_points)],
        }
        rows.append(
            {
                "candidate": candidate,
                "goodput": goodput,
                "throughput": goodput,
                "num_devices": 32_768,
                "device_hours": 32_768 * 24 * 90.0,
                "incidents_per_day": {"restart": 11.1},
                "pauses": 0.0,
                "peak_hit_groups": {"mean": 4.0, "p5": 3.0, "p95": 5.0, "error": 0.1},
                "mean_w": 0.0,
                "grid_days": [float(day) for day in range(90)],
                "grid_throughput": [[0.8, 0.9, 0.95] for _ in range(90)],
                "series": series,
                "ledger_device_h": {"productive": 90.0, "idle": 6.0 - index, "failed": 4.0 + index},
            }
        )
    job = {"tp": 64, "pp": 4, "dp": 128}
    origin = {"command": ["runflat", "simulate", "q.toml"], "version": "0.1.0"}
    return {"name": name, "origin": origin, "config": {"job": job, "days": 90.0, "seeds": 3}, "results": rows}


def write_large_run(folder: Path) -> Path:
    """A run of 4,096 devices in domains of 72, with 400 losses and returns; it goes on."""
    write_run(folder, finished=False)
    names = [f"{replica}:{slot}" for replica in range(56) for slot in range(72)] + [f"s{n}" for n in range(64)]
    rows = [{"device": name, "state": "active"} for name in names]
    (folder / "devices.json").write_text(json.dumps({"finished": False, "time_s": 2000.0, "devices": rows}))
    config = {"layout": {"tp": 72, "replicas": 56}, "train": {"steps": 10}}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "events.jsonl").open("a") as file:
        for number in range(400):
            kind, device = ("fail", "return")[number % 2], names[(number // 2) * 17 % len(names)]
            file.write(json.dumps({"event": kind, "device": device, "time_s": 20.0 + number, "cause": "x"}) + "\n")
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run on emulated devices that lost a device and took it back."""
    return write_run(tmp_path / "small")


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Writes a run's folder where it is told."""
    return write_run


@pytest.fixture
def large_run(tmp_path: Path) -> Path:
    """A running job of thousands of devices."""
    return write_large_run(tmp_path / "many")


@pytest.fixture
def make_simulation() -> Callable[..., dict[str, Any]]:
    """Makes a simulation's result."""
    return simulation


class Browser:
    """One headless Chromium with one page. Everything that it says on its console and asks for is kept."""

    def __init__(self, profile: Path):
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-extensions"]
        # The browser reads its orders from descriptor 3 and answers on 4.
        order = 'exec "$@" 3<&"$RF_IN" 4>&"$RF_OUT"'
        self._process = subprocess.Popen(
            ["bash", "-c", order, "browser", program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            env={**os.environ, "RF_IN": str(to_browser), "RF_OUT": str(from_browser), "HOME": str(profile)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Performance.enable", timeDomain="threadTicks")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the browser's answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has gone"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.console.append(str(params["entry"]["text"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Page.loadEventFired":
            self._loaded = True
        return message

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page and wait until it is loaded; what the page before still says is no longer heard."""
        self._go("about:blank")
        self.console.clear()
        self.requests.clear()
        mobile = width < 500
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._go(url)

    def _go(self, url: str) -> None:
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def eval(self, code: str) -> Any:
        """Returns the value of a JavaScript expression; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def busy_s(self) -> float:
        """CPU seconds of the page's main thread since it was opened, whatever else the machine does."""
        found = {one["name"]: one["value"] for one in self.send("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def key(self, name: str) -> None:
        """Press a key where the focus is."""
        codes = {
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
            "Tab": 9,
            "Escape": 27,
        }
        words = {"text": "\r"} if name == "Enter" else {}  # without its character, Enter presses no button
        code = codes.get(name, 13)
        for kind in ("keyDown" if words else "rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **words)

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)  # it ends when its orders end
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests that want one."""
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


class Terminal:
    """A tmux session of its own server."""

    def __init__(self, folder: Path):
        self.socket = folder / "tmux"
        self.pause = threading.Event()

    def tmux(self, *words: str) -> str:
        """Output of a tmux command."""
        command = ["tmux", "-u", "-S", str(self.socket), "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

    def start(self, run: Path, *, width: int = 80, height: int = 24, settings: str = "") -> None:
        """Begin `runflat top`; when it has ended, its exit code stands on the screen."""
        program = f"env {settings} PYTHONPATH='{ROOT}' '{sys.executable}' -m runflat.cli top '{run}'"
        order = f"{program}; echo code $?; exec cat"
        self.tmux("new-session", "-d", "-x", str(width), "-y", str(height), "-s", "t", "sh", "-c", order)

    def press(self, *keys: str) -> None:
        """Type keys, named as tmux names them."""
        self.tmux("send-keys", "-t", "t", *keys)

    def shows(self, text: str, *, colors: bool = False, patience_s: float = PATIENCE_S) -> str:
        """The screen, once it has `text` on it."""
        end = time.monotonic() + patience_s
        while True:
            shown = self.tmux("capture-pane", "-p", *(["-e"] if colors else []), "-t", "t")
            if text in shown:
                return shown
            assert time.monotonic() < end, f"never shown: {text}\n{shown}"
            self.pause.wait(0.1)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal, ended afterwards."""
    found = Terminal(tmp_path)
    yield found
    subprocess.run(["tmux", "-S", str(found.socket), "kill-server"], check=False, capture_output=True, timeout=20)
