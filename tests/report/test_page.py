"""The report in a browser: it needs nothing else, every figure is there, and hands, eyes and printers can use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runflat import cli

pytestmark = [pytest.mark.needs_chromium, pytest.mark.xdist_group("browser")]

MOST_BYTES = 6e6
OPENS_WITHIN_S = 2.0
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
EMPTY = (Path(__file__).parent / "figures.js").read_text()


def report(tmp_path: Path, *inputs: Path) -> str:
    """Writes a report; returns its URL."""
    page = tmp_path / "report.html"
    assert cli.run(["report", *map(str, inputs), "-o", str(page)]) == 0
    return page.as_uri()


@pytest.fixture
def result(tmp_path: Path, make_simulation: Callable[..., dict[str, Any]]) -> Path:
    """A simulation's result file."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(make_simulation()))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_it_is_whole_and_readable(
    browser: Any, tmp_path: Path, run_folder: Path, result: Path, width: int, dark: bool
) -> None:
    """Catches errors on the console, requests to anywhere, empty figures, faint words, a page wider than the screen."""
    url = report(tmp_path, run_folder, result)
    browser.open(url, width=width, height=900, dark=dark)
    assert browser.console == []
    assert [request for request in browser.requests if request != url and not request.startswith("data:")] == []
    for panel in ("v1", "v2"):
        browser.eval(f"document.getElementById('tab-{panel}').click()")
        drawn = browser.eval(EMPTY)
        assert len(drawn) >= 6
        assert min(drawn) > 0
        found = browser.eval(CONTRAST)
        assert found["seen"] > 50
        assert found["bad"] == []
        assert browser.eval("document.documentElement.scrollWidth <= innerWidth")
    assert browser.console == []


def test_keys_reach_everything(browser: Any, tmp_path: Path, run_folder: Path, result: Path) -> None:
    """Catches tabs, the slider and the values of lines that only a mouse can reach."""
    browser.open(report(tmp_path, run_folder, result))
    browser.eval("document.getElementById('tab-v1').focus()")
    browser.key("ArrowRight")
    assert browser.eval("[document.getElementById('v1').hidden, document.getElementById('v2').hidden]") == [True, False]
    browser.key("ArrowRight")
    assert browser.eval("document.getElementById('v1').hidden") is False
    browser.eval("document.querySelector('#v1-map input').focus()")
    browser.key("Home")
    assert browser.eval("document.querySelector('#v1-map .when').textContent").startswith("0.00 s the run starts")
    assert browser.eval("document.querySelectorAll('#v1-map .wide .m-S').length") == 4
    for _ in range(2):
        browser.key("ArrowRight")
    assert "1:1 is lost" in browser.eval("document.querySelector('#v1-map .when').textContent")
    assert browser.eval("document.querySelectorAll('#v1-map .wide rect.m-L').length") == 1
    browser.key("End")
    assert browser.eval("document.querySelectorAll('#v1-map .wide rect.m-L').length") == 0
    browser.key("Home")
    assert browser.eval("document.querySelectorAll('#v1-map .wide .m-A').length") == 0
    browser.eval("document.querySelector('#v1-map .plot').focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    assert browser.eval("document.querySelector('#v1-map .cellinfo').textContent") == "1:0: starting"
    browser.eval("document.querySelector('#v1-loss .plot').focus()")
    browser.key("End")
    assert browser.eval("document.querySelector('#v1-loss .tip').textContent") == "step: 9\nloss: 3.2"


def test_numbers_are_those_of_the_files(browser: Any, tmp_path: Path, run_folder: Path) -> None:
    """Catches a number on the page that the run's files do not have."""
    summary = json.loads((run_folder / "summary.json").read_text())
    browser.open(report(tmp_path, run_folder))
    texts = "Array.from(document.querySelectorAll('.tile')).map((t) => Array.from(t.children, (c) => c.textContent))"
    tiles = {what: value for what, value, _ in browser.eval(texts)}
    assert tiles["goodput"] == f"{100 * summary['goodput']:.1f} %"
    assert tiles["steps"] == "10 of 10"
    assert tiles["incidents"] == "1"
    assert tiles["tokens/s"] == "2,048"
    assert tiles["loss"] == f"{summary['loss']:.4f}"
    text = browser.eval("document.querySelector('#v1').textContent")
    for words in ("emulated devices", "runflat train --run r", "runflat 0.1.0", str(run_folder), "0.13 s"):
        assert words in text


def test_figures_can_be_saved(browser: Any, tmp_path: Path, run_folder: Path) -> None:
    """Catches a button that saves nothing, or a drawing without its colours."""
    browser.open(report(tmp_path, run_folder))
    code = "runflatSaved('{}', document.getElementById('{}')).then(([blob]) => {})"
    csv = browser.eval(code.format("csv", "v1-loss", "blob.text()"))
    assert csv.splitlines()[0] == "line,step,nats per token,low,high"
    assert len(csv.splitlines()) == 11
    for figure in ("v1-loss", "v1-map", "v1-ledger"):
        svg = browser.eval(code.format("svg", figure, "blob.text()"))
        assert 'fill="rgb(' in svg
        assert "var(" not in svg
        assert browser.eval(code.format("png", figure, "blob.size")) > 3000
    assert browser.console == []


def test_a_hostile_run_stays_words(
    browser: Any, tmp_path: Path, make_run: Callable[..., Path], make_simulation: Callable[..., dict[str, Any]]
) -> None:
    """Catches a run, model, device or strategy name that becomes part of the page's code."""
    bad = "<img src=x onerror=alert(1)>\"'`${1}"
    folder = make_run(tmp_path / bad)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model": {"preset": bad + "</script>"}}))
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace("killed by signal 9 (SIGKILL)", "</script><script>alert(2)</script>"))
    result = tmp_path / "x.json"
    result.write_text(json.dumps(make_simulation(name="</title><script>alert(3)</script>")))
    url = report(tmp_path, folder, result)
    browser.open(url)
    assert browser.console == []
    assert browser.eval("document.querySelectorAll('img').length") == 0
    assert browser.eval("document.querySelectorAll('script:not([type])').length") == 1
    assert browser.eval("document.querySelector('h1').textContent").startswith(bad)
    assert [request for request in browser.requests if request != url and not request.startswith("data:")] == []


LARGE = """
name = "large"
days = 80
seeds = 1
strategies = ["restart", "ntp,drop,restart"]
[cluster]
hardware = "b200"
domain_size = 32
[job]
tp = 32
pp = 8
dp = 128
[failures]
[[failures.components]]
name = "GPU"
per_device_day = 5e-4
repair = { kind = "fixed", hours = 60.0 }
"""


def test_a_thousand_incidents_of_32768_gpus(browser: Any, tmp_path: Path) -> None:
    """Catches a page that grows with the events of a simulation until no browser opens it within two seconds."""
    question, result = tmp_path / "large.toml", tmp_path / "large.json"
    question.write_text(LARGE)
    assert cli.run(["simulate", str(question), "--json", str(result), "--figures", "None"]) == 0
    rows = json.loads(result.read_text())["results"]
    assert {row["num_devices"] for row in rows} == {32_768}
    assert 80 * sum(count for name, count in rows[1]["incidents_per_day"].items() if name[0] != "+") > 1000
    url = report(tmp_path, result)
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    browser.open(url)
    assert min(browser.eval(EMPTY)) > 0
    assert browser.busy_s() < OPENS_WITHIN_S
    assert browser.eval("document.querySelectorAll('*').length") < 5_000
    assert browser.console == []


def test_thousands_of_devices_stay_responsive(browser: Any, tmp_path: Path, large_run: Path) -> None:
    """Catches a map of 4,096 devices that makes the page heavy, slow to open, or slow to move through time."""
    url = report(tmp_path, large_run)
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    browser.open(url)
    assert browser.busy_s() < OPENS_WITHIN_S
    assert browser.eval("document.querySelectorAll('#v1-map .wide rect.cell').length") == 4096
    browser.eval("document.querySelector('#v1-map input').focus()")
    before = browser.busy_s()
    for key in ("Home", "End", "Home"):
        browser.key(key)
        assert browser.eval("document.querySelector('#v1-map .when').textContent.length") > 0
    assert browser.busy_s() - before < OPENS_WITHIN_S
    assert browser.console == []


def test_it_prints(browser: Any, tmp_path: Path, run_folder: Path, result: Path) -> None:
    """Catches a printed page without the figures of hidden tabs, or dark ones."""
    browser.open(report(tmp_path, run_folder, result), dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert min(browser.eval(EMPTY)) > 0
    assert browser.eval("document.getElementById('v2').getClientRects().length") > 0
    assert browser.eval("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
    assert len(browser.send("Page.printToPDF")["data"]) > 20_000
    browser.send("Emulation.setEmulatedMedia", media="")
