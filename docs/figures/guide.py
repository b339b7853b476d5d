"""Makes the pictures of the guide and of the README by the commands that the guide names, from what those wrote.

make demo
python docs/figures/guide.py          # in the environment of the demo and the repository's folder; needs chromium
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = Path("runs/guide")
DEMO = Path("runs/demo")
RUNFLAT = (sys.executable, "-m", "runflat.cli")
LOSS = [{"event": "kill", "device": "0:1", "step": 5, "phase": "backward"}]

COMMANDS: list[tuple[str, ...]] = [
    (*RUNFLAT, "train", "--run", f"{RUNS}/start", "--model.preset", "tiny", "--train.steps", "2", "--layout.tp", "1"),
    (*RUNFLAT, "export", f"{RUNS}/start", "--to", f"{RUNS}/model"),
    (sys.executable, "examples/own_loop/elastic.py", f"{RUNS}/model", f"{RUNS}/loop", f"{RUNS}/loop.json"),
    (*RUNFLAT, "simulate", "examples/cluster.toml", "--json", f"{RUNS}/cluster.json", "--figures", "None"),
    (*RUNFLAT, "simulate", "examples/trace.toml", "--json", f"{RUNS}/trace.json", "--figures", "None"),
]
"""What makes runs and results; `make demo` has made some before."""

PICTURES = {
    "five_minutes": (DEMO / "hurt", "tokens"),
    "incident": (DEMO / "hurt", "incidents"),
    "devices": (DEMO / "hurt", "map"),
    "strategies": (RUNS / "cluster.json", "goodput"),
    "strategies_time": (RUNS / "cluster.json", "losses"),
    "boost": (DEMO / "power", "power"),
    "boost_devices": (DEMO / "power", "map"),
    "own_loop": (RUNS / "loop", "loss"),
    "own_trace": (RUNS / "trace.json", "availability"),
}
"""Picture -> (what is reported, which of its figures)."""


def run(*command: str) -> None:
    """Run a command; its output is not of interest unless it fails."""
    print(" ".join(command).replace(sys.executable, "python"), flush=True)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:])


def draw() -> None:
    """Write the pictures from what the commands have left."""
    for source in sorted({source for source, _ in PICTURES.values()}):
        folder = RUNS / "figures" / source.stem
        run(*RUNFLAT, "report", str(source), "-o", f"{folder}.html", "--figures", str(folder))
        for name, (wanted, key) in PICTURES.items():
            if wanted == source:
                shutil.copy(folder / f"v1-{key}.svg", HERE / f"{name}.svg")
    page = (DEMO / "report.html").resolve().as_uri()
    look = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,880", "--force-color-profile=srgb")
    run("chromium", *look, f"--screenshot={(HERE / 'report.png').resolve()}", page)


def main() -> None:
    """Run all commands, then draw."""
    if not (DEMO / "report.html").exists():
        sys.exit("there is no runs/demo/report.html: run `make demo` first")
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    (RUNS / "loop.json").write_text(json.dumps(LOSS))
    for command in COMMANDS:
        run(*command)
    draw()


if __name__ == "__main__":
    main()
