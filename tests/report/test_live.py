"""The page of a running job: it follows the run's files, tells Prometheus, and changes nothing without a token."""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from runflat.commands.watching import Watching, split, watched
from runflat.errors import ConfigError
from runflat.report.hook import IncidentHook, tell
from runflat.report.live import LivePage, Snapshots
from runflat.report.metrics import prometheus
from runflat.report.run_files import read_run

MakeRun = Callable[..., Path]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
EMPTY = (Path(__file__).parent / "figures.js").read_text()
SEEN = "new Promise((done) => {{ const look = () => ({}) ? done(true) : setTimeout(look, 50); look(); }})"


class Asked:
    """Stands for the controller."""

    def __init__(self) -> None:
        self.wishes: list[tuple[str, str]] = []

    def __call__(self, action: str, device: str) -> tuple[bool, str]:
        self.wishes.append((action, device))
        return True, f"{device} will {action}"


@pytest.fixture
def controller() -> Asked:
    """Notes what it is asked."""
    return Asked()


@pytest.fixture
def running(make_run: MakeRun, tmp_path: Path) -> Path:
    """A run that is under way: nothing is lost yet."""
    folder = make_run(tmp_path / "live", finished=False)
    path = folder / "events.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    return folder


@pytest.fixture
def page(running: Path, controller: Asked) -> Iterator[LivePage]:
    """A page with a token."""
    served = LivePage(running, "127.0.0.1", 0, "secret", controller)
    yield served
    served.close()


def post(page: LivePage, path: str = "device", body: Any = None, **headers: str) -> tuple[int, str]:
    """(status, text) of a POST; a header given as "" is left out."""
    own = {"Origin": page.url.rstrip("/"), "Content-Type": "application/json", "X-Runflat-Token": "secret"}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    wish = {"action": "drain", "device": "1:1", "confirm": "1:1"} if body is None else body
    data = json.dumps(wish).encode()
    kept = {name: value for name, value in own.items() if value}
    request = urllib.request.Request(f"{page.url}{path}", data, kept, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)["text"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["text"]


def test_a_confirmed_post_with_the_token_is_passed_on(page: LivePage, controller: Asked) -> None:
    """Catches a page that cannot do what it offers."""
    assert post(page) == (200, "1:1 will drain")
    assert controller.wishes == [("drain", "1:1")]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"X_Runflat_Token": "wrong"}, None, 403),
        ({"X_Runflat_Token": ""}, None, 403),
        ({"Origin": "http://evil.example"}, None, 403),
        ({"Origin": ""}, None, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, None, 403),
        ({"Content_Type": "text/plain"}, None, 403),
        ({}, {"action": "drain", "device": "1:1"}, 400),
        ({}, {"action": "drain", "device": "1:1", "confirm": "1:0"}, 400),
        ({}, {"action": "kill", "device": "1:1", "confirm": "1:1"}, 400),
        ({}, ["drain"], 400),
    ],
)
def test_everything_else_is_refused(
    page: LivePage, controller: Asked, headers: dict[str, str], body: Any, status: int
) -> None:
    """Catches a change by a foreign page, without token, or without confirmation."""
    assert post(page, body=body, **headers)[0] == status
    assert controller.wishes == []


def test_without_a_token_nothing_can_be_changed(running: Path, controller: Asked) -> None:
    """Catches a page that takes an empty token for the right one."""
    served = LivePage(running, "127.0.0.1", 0, None, controller)
    try:
        assert post(served)[0] == 403
        assert post(served, X_Runflat_Token="")[0] == 403
        with urllib.request.urlopen(served.url, timeout=20) as answer:
            assert b"<form" not in answer.read()
    finally:
        served.close()
    assert controller.wishes == []


def test_a_foreign_name_for_this_machine_reads_nothing(page: LivePage) -> None:
    """Catches a page of the internet that reads the run through a name that leads to this machine."""
    request = urllib.request.Request(page.url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    caught.value.close()
    assert caught.value.code == 403


def test_the_page_at_an_interface() -> None:
    """Catches an interface that is taken for a host name, as the controller's --listen takes it."""
    assert split(["--page", "0", "--page-host", "lo"])[0].host == "127.0.0.1"
    with pytest.raises(ConfigError, match="--page-host is 'no such host'"):
        split(["--page", "0", "--page-host", "no such host"])


@pytest.mark.needs_chromium
@pytest.mark.xdist_group("browser")
def test_the_page_follows_a_loss_and_a_return(
    browser: Any, page: LivePage, running: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    """Catches a live page that does not show the loss, the lower degree and the return, or says errors."""
    events = (make_run(tmp_path / "whole") / "events.jsonl").read_text().splitlines(keepends=True)
    browser.open(page.url)
    cells = "document.querySelectorAll('#v1-map .wide rect.m-{}').length === {}"
    assert browser.eval(SEEN.format(cells.format("A", 4)))
    states = json.loads((running / "devices.json").read_text())

    def become(state: str, rows: list[str]) -> None:
        for row in states["devices"]:
            row["state"] = state if row["device"] == "1:1" else "active"
        (running / "devices.json").write_text(json.dumps(states))
        with (running / "events.jsonl").open("a") as file:
            file.writelines(rows)

    become("lost", events[2:7])
    assert browser.eval(SEEN.format(cells.format("L", 1)))
    assert browser.eval(SEEN.format("document.querySelector('#v1-map').textContent.includes('TP 1 of 2')"))
    assert browser.eval(SEEN.format("document.querySelector('#v1-incidents') !== null"))
    become("active", events[7:10])
    assert browser.eval(SEEN.format(cells.format("A", 4)))
    assert browser.console == []
    assert {url.rstrip("/").rsplit("/", 1)[0] for url in browser.requests if url.startswith("http")} <= {
        "http:/",
        page.url.rstrip("/"),
    }


@pytest.mark.needs_chromium
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_it_is_whole_and_readable(
    browser: Any, make_run: MakeRun, tmp_path: Path, controller: Asked, width: int, dark: bool
) -> None:
    """Catches a live page with empty figures, faint words, other numbers than the files, or too wide."""
    run = make_run(tmp_path / "job", finished=False)
    served = LivePage(run, "127.0.0.1", 0, "secret", controller)
    try:
        browser.open(served.url, width=width, dark=dark)
        assert browser.eval(SEEN.format("document.getElementById('state').textContent.startsWith('running')"))
        drawn = browser.eval(EMPTY)
        assert len(drawn) >= 6
        assert min(drawn) > 0
        found = browser.eval(CONTRAST)
        assert found["seen"] > 50
        assert found["bad"] == []
        assert browser.eval("document.documentElement.scrollWidth <= innerWidth")
        text = browser.eval("document.body.textContent")
        for words in ("3.2000", "2,048", "0.13 s", "468.5 kB", "emulated devices"):
            assert words in text
        browser.eval("document.querySelector('#v1-map input').focus()")
        browser.key("Home")
        assert "the run starts" in browser.eval("document.querySelector('#v1-map .when').textContent")
        assert browser.console == []
        assert [url for url in browser.requests if not url.startswith((served.url, "data:"))] == []
    finally:
        served.close()


@pytest.mark.needs_chromium
@pytest.mark.xdist_group("browser")
def test_the_form_asks_before_it_acts(browser: Any, page: LivePage, controller: Asked) -> None:
    """Catches a form that acts without a yes, or whose yes reaches nobody; all by keyboard."""
    browser.open(f"{page.url}#token=secret")
    answered = "document.getElementById('sure').open === {}"
    for button in ("no", "yes"):
        browser.eval("document.querySelector('#ask [name=device]').value = '1:1'")
        browser.eval("document.querySelector('#ask > button').focus()")
        browser.key("Enter")
        assert browser.eval(SEEN.format(answered.format("true")))
        assert browser.eval("document.getElementById('sure-text').textContent") == "Really ask 1:1 to drain?"
        assert controller.wishes == []
        browser.eval(f"document.querySelector('#sure button[value={button}]').focus()")
        browser.key("Enter")
        assert browser.eval(SEEN.format(answered.format("false")))
    assert browser.eval(SEEN.format("document.getElementById('answer').textContent === '1:1 will drain'"))
    browser.eval("document.querySelector('#ask > button').focus()")
    browser.key("Enter")
    assert browser.eval(SEEN.format(answered.format("true")))
    browser.key("Escape")
    assert browser.eval(SEEN.format(answered.format("false")))
    assert browser.eval("new Promise((done) => setTimeout(() => done(true), 300))")
    assert controller.wishes == [("drain", "1:1")]
    assert browser.console == []


@pytest.mark.needs_chromium
@pytest.mark.xdist_group("browser")
def test_a_page_of_thousands_of_devices_follows(browser: Any, large_run: Path, controller: Asked) -> None:
    """Catches a page that redraws 4,096 devices at each look: the browser has half a second for it, and must rest."""
    served = LivePage(large_run, "127.0.0.1", 0, None, controller)
    try:
        browser.open(served.url)
        cells = "document.querySelectorAll('#v1-map .wide rect.m-L').length"
        assert browser.eval(SEEN.format("document.getElementById('state').textContent.startsWith('running')"))
        before = browser.eval(cells)
        busy_s = browser.busy_s()
        devices = json.loads((large_run / "devices.json").read_text())
        devices["devices"][5]["state"] = "lost"
        (large_run / "devices.json").write_text(json.dumps(devices))
        assert browser.eval(SEEN.format(f"{cells} === {before + 1}"))
        assert browser.busy_s() - busy_s < 0.5
        assert browser.console == []
    finally:
        served.close()


def test_metrics_are_those_of_the_files(run_folder: Path) -> None:
    """Catches a metric under another name or with another number than the ledger's."""
    text = prometheus(read_run(run_folder))
    for line in (
        "runflat_goodput_ratio 0.5",
        'runflat_device_seconds_total{category="failed",type="ELASTIC_SLICE_DOWN"} 3.0',
        'runflat_replica_degree{replica="1"} 2.0',
        "runflat_incidents_total 1.0",
        "runflat_recovery_seconds_total 0.13",
        "runflat_moved_bytes_total 2206720.0",
        'runflat_devices{state="active"} 4.0',
    ):
        assert f"{line}\n" in text


def test_metrics_are_served(page: LivePage) -> None:
    """Catches a server without the endpoint that Prometheus asks for."""
    with urllib.request.urlopen(f"{page.url}metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"runflat_step 10.0\n" in answer.read()


def test_a_command_is_told_of_each_new_incident(running: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a hook that is silent, speaks twice, or speaks of what was before it."""
    heard = tmp_path / "heard"
    said: list[str] = []
    hook = IncidentHook(running, f"tee -a {heard}", said.append)
    events = (make_run(tmp_path / "whole") / "events.jsonl").read_text()
    (running / "events.jsonl").write_text(events)
    hook.close()
    told = json.loads(heard.read_text())
    assert (told["number"], told["devices"], told["stopped_s"]) == (1, ["1:1"], 0.13)
    assert said == []


def test_an_address_is_posted_to() -> None:
    """Catches a webhook that gets nothing, and a failure that is not said."""
    got: list[bytes] = []

    class Hear(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hear)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert tell(f"http://127.0.0.1:{server.server_address[1]}/", '{"number": 1}') is None
    thread.join()
    server.server_close()
    assert got == [b'{"number": 1}']
    assert "no-such-program" in str(tell("no-such-program", "{}"))
    assert "ended with 1" in str(tell("false", "{}"))


def test_flags_of_the_page_are_taken_out() -> None:
    """Catches flags that reach the configuration, or a port that is none."""
    watching, rest = split(["--page", "0", "--run", "r", "--on-incident=page me", "--page-token", "auto"])
    assert rest == ["--run", "r"]
    assert (watching.page, watching.host, watching.on_incident) == (0, "127.0.0.1", "page me")
    assert len(watching.token or "") > 15
    assert split([]) == (Watching(), [])
    for argv in (["--page"], ["--page", "x"], ["--page", "70000"]):
        with pytest.raises(ConfigError, match="--page"):
            split(argv)


def test_the_dashboard_asks_for_metrics_that_exist(run_folder: Path) -> None:
    """Catches a Grafana panel that stays empty because a metric has another name."""
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {name for one in dashboard["panels"] for name in re.findall(r"runflat_\w+", one["targets"][0]["expr"])}
    source = (Path(__file__).parents[2] / "runflat" / "report" / "metrics.py").read_text()
    assert asked
    assert [name for name in asked if f'"{name}"' not in source] == []


def test_what_the_flags_ask_for_is_there_while_the_run_lasts(running: Path) -> None:
    """Catches a page that is announced but not served, or outlives the run."""
    said: list[str] = []
    with watched(Watching(page=0, token="t", on_incident="true"), running, said.append):
        url = re.findall(r"http://127\.0\.0\.1:\d+/", said[0])[0]
        assert f"{url}#token=t" in said[0]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"<form" in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=20)


def test_figures_that_take_long_rest_long_and_the_map_does_not(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a page of a long run that keeps the controller's process busy, or shows a loss late because of it."""
    run = make_run(tmp_path / "job", finished=False)
    clock = iter([0.0, 0.0, 2.0, 2.0, 9.0, 23.0, 23.0, 24.0, 24.0, 25.0, 25.0, 25.0, 25.0])
    snapshots = Snapshots(run, lambda: next(clock))
    sent = -1

    def next_message(state: str, **more: Any) -> list[str]:
        nonlocal sent
        devices = json.loads((run / "devices.json").read_text())
        devices["devices"][3]["state"] = state
        (run / "devices.json").write_text(json.dumps({**devices, **more}))
        snapshots.refresh()
        text, sent = snapshots.message(sent)
        said = json.loads(text)
        assert state in {look[1] for look in said["map"]["looks"]}
        return sorted(said["html"])

    both = ["v1-after", "v1-before"]
    assert next_message("active") == both  # drawn from 0 to 2 s
    assert next_message("out") == []  # at 9 s: not before 22 s
    assert next_message("parked") == both  # from 23 to 24 s
    assert next_message("active", finished=True) == both  # the end is not waited for
    other, _ = snapshots.message(-1)
    assert sorted(json.loads(other)["html"]) == both


def test_the_end_waits_for_the_last_word(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that ends while the last state is drawn, so that open pages never say that the run is over."""
    message, said = page.snapshots.message, []

    def slow(figures_sent: int = -1) -> tuple[str, int]:
        if page.ended.is_set():
            threading.Event().wait(0.5)
            said.append("last")
        return message(figures_sent)

    monkeypatch.setattr(page.snapshots, "message", slow)
    monkeypatch.setattr(page.snapshots, "owes_figures", lambda sent: page.ended.is_set())
    with urllib.request.urlopen(f"{page.url}events", timeout=20) as stream:
        assert stream.readline().startswith(b"data: ")
        page.close()
        assert said == ["last"]
