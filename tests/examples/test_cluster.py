"""The recipes for clusters: they parse, start what they should as their launchers would, and start again what dies."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from runflat.commands.controller import parse_controller
from runflat.commands.worker import WorkerArgs

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "cluster"

RUNFLAT = """#!/bin/bash
# Stands for runflat: writes down how it was started; rank 1 is killed the first time; the controller waits for all.
echo "$*" >> "$NOTES/$1.$RANK$SLURM_PROCID"
if [ "$1" = controller ]; then
  until [ "$(cat "$NOTES"/done.* 2>/dev/null | wc -l)" -ge "$WORKERS" ]; do command -p sleep 0.05; done
  exit "${CONTROLLER_CODE:-0}"
fi
rank=$RANK$SLURM_PROCID
if [ "$rank" = 1 ] && [ ! -e "$NOTES/killed" ]; then touch "$NOTES/killed"; kill -9 $$; fi
echo "$rank $LOCAL_RANK$SLURM_LOCALID" > "$NOTES/done.$rank"
"""
SRUN = """#!/bin/bash
# Stands for srun: starts every task of the job, and waits for all whatever becomes of one.
[[ " $* " == *" --kill-on-bad-exit=0 "* && " $* " == *" --no-kill "* ]] || exit 9
while [[ "$1" == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NNODES * SLURM_NTASKS_PER_NODE; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) "$@" &
done
wait
"""
SSH = """#!/bin/bash
# Stands for ssh: the last argument is a command line for the shell at the other end.
exec bash -c "${@: -1}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Returns an environment whose runflat, srun, ssh and sleep are stand-ins."""
    for name, text in {"runflat": RUNFLAT, "srun": SRUN, "ssh": SSH, "sleep": "#!/bin/sh\n"}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "notes").mkdir()
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "RUN": str(tmp_path / "run"),
        "CONFIG": str(ROOT / "examples" / "tiny.toml"),
        "LISTEN": "lo",
    }


def run(environment: dict[str, str], *command: str) -> int:
    """Returns the exit code of a recipe."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
    assert done.stderr.count("command not found") == 0, done.stderr
    return done.returncode


def notes(environment: dict[str, str], pattern: str) -> dict[str, list[str]]:
    """Returns what the stand-ins have written down: lines by file."""
    found = sorted(Path(environment["NOTES"]).glob(pattern))
    return {path.name: path.read_text().splitlines() for path in found}


def check_starts(environment: dict[str, str], num_workers: int, per_node: int) -> None:
    """Every device has one worker, one that was killed was started again, and the real commands take the flags."""
    done = notes(environment, "done.*")
    assert done == {f"done.{rank}": [f"{rank} {rank % per_node}"] for rank in sorted(range(num_workers), key=str)}
    workers = notes(environment, "worker.*")
    assert {name: len(lines) for name, lines in workers.items() if len(lines) > 1} == {"worker.1": 2}
    for line in {line for lines in workers.values() for line in lines}:
        tyro.cli(WorkerArgs, args=shlex.split(line)[1:])
    for lines in notes(environment, "controller.*").values():
        check_controller(lines[0], num_workers)


def check_controller(line: str, num_workers: int) -> None:
    """The controller takes the flags, and has as many devices as there are workers."""
    config, _, _ = parse_controller(shlex.split(line)[1:])
    assert config.layout.tp * config.layout.replicas + config.spares == num_workers


@pytest.mark.parametrize("code", [0, 1])
def test_slurm(environment: dict[str, str], code: int) -> None:
    """Catches a script in which one dead task ends the job, ranks are not handed on, or an error becomes a success."""
    environment |= {
        "SLURM_NNODES": "3",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_JOB_ID": "7",
        "WORKERS": "24",
        "CONTROLLER_CODE": str(code),
    }
    text = (RECIPES / "slurm.sbatch").read_text()
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=8\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert run(environment, "bash", str(RECIPES / "slurm.sbatch")) == code
    if code == 0:
        check_starts(environment, 24, 8)


def test_ssh(environment: dict[str, str]) -> None:
    """Catches ranks that are given twice or out of the order of the nodes, and a worker that is not started again."""
    environment["WORKERS"] = "24"
    assert run(environment, "bash", str(RECIPES / "ssh.sh"), "a", "b", "c") == 0
    check_starts(environment, 24, 8)
    nodes = [notes(environment, f"worker.{rank}")[f"worker.{rank}"][0].split("--node ")[1] for rank in (0, 8, 23)]
    assert nodes == ["a", "b", "c"]
    assert run(environment, "bash", str(RECIPES / "ssh.sh")) == 2, "without nodes it says how it is used"


def test_kubernetes(environment: dict[str, str]) -> None:
    """Catches a manifest that does not parse, restarts all for one, or whose scripts do not fit its numbers."""
    manifest = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    jobs = {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    assert all(job["backoffLimit"] >= 100 for job in jobs.values())
    pods: dict[str, Any] = {name: job["template"]["spec"] for name, job in jobs.items()}
    assert all(pod["restartPolicy"] == "OnFailure" for pod in pods.values())
    for pod in pods.values():
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    variables = {entry["name"]: entry.get("value") for entry in pods["node"]["containers"][0]["env"]}
    assert variables["MASTER_ADDR"] == f"{manifest['metadata']['name']}-controller-0-0.{manifest['metadata']['name']}"
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_NAME": "n", "WORKERS": "24"}
    for index in range(jobs["node"]["completions"]):
        environment["JOB_COMPLETION_INDEX"] = str(index)
        assert run(environment, "bash", "-c", pods["node"]["containers"][0]["args"][0]) == 0
    check_starts(environment, 24, pods["node"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    environment["POD_IP"] = "127.0.0.1"
    script = pods["controller"]["containers"][0]["args"][0]
    script = script.replace("/shared/job.toml", environment["CONFIG"]).replace("/shared", environment["RUN"])
    assert run(environment, "bash", "-c", script) == 0
    check_controller(notes(environment, "controller.*")["controller."][0], 24)
