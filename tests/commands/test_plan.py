"""`runflat plan` as users and programs see it. Models are built on the meta device, so large ones are quick too."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runflat.cli import run
from runflat.plan.plan import plan_from_json

ISSUE = ["--tp", "8", "--replicas", "4", "--dead", "1:3", "--dead", "2:0", "--dead", "2:5"]
KEYS = {"model", "layout", "plan", "replicas", "devices", "transfers", "sync_groups", "sync_modes"}
KEYS |= {"optimizer", "replicated", "domains"}


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns what the command prints; it must succeed and be silent on stderr."""
    code = run(["plan", *argv])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Returns the command's JSON object."""
    found: dict[str, Any] = json.loads(plan(capsys, *argv, "--json"))
    return found


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a key that is gone or undocumented, and numbers that contradict each other."""
    found = planned(capsys, "--model", "llama3-70b", *ISSUE)
    assert set(found) == KEYS
    assert found["model"]["num_params"] == 70_553_706_496
    assert found["layout"]["dead"] == ["1:3", "2:0", "2:5"]
    assert found["layout"]["num_devices"] == len(found["devices"]) == 29
    assert sum(replica["num_sequences"] for replica in found["replicas"]) == found["layout"]["sequences"] == 64
    assert [replica["tp"] for replica in found["replicas"]] == [8, 7, 6, 8]
    assert max(replica["step_time"] for replica in found["replicas"]) == 1
    assert plan_from_json(json.dumps(found["plan"])).num_sequences == 64
    assert isinstance(found["sync_groups"], list)
    healthy = [group for group in found["sync_groups"] if group["members"] == ["0:1", "1:1", "2:1", "3:1"]]
    assert healthy[0]["units"]["head"] == list(range(8, 16))
    assert {group["by"] for group in found["sync_groups"]} == {"all_reduce"}
    assert sum(move["num_bytes"] for move in found["transfers"]["moves"]) == found["transfers"]["bytes"]
    assert found["transfers"]["lost_units"] == {}
    sent = found["devices"][0]["traffic"]
    assert sent["total_bytes"] == sum(value for key, value in sent.items() if key.endswith("_bytes")) / 2
    # all gradients: those that groups sum, and the replicated ones
    in_groups = sum(group["bytes"] for group in found["sync_groups"])
    assert in_groups + found["replicated"]["bytes"] == 4 * found["model"]["num_params"]


def test_modes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a comparison whose modes are mixed up, and keys that the documentation does not name.

    One of eight devices dead: in `direct` a healthy device sends 0.75 of what it sends in `reshard`, and nothing inside
    its replica, but more and smaller messages.
    """
    modes = planned(capsys, "--model", "llama3-70b", "--tp", "8", "--replicas", "2", "--dead", "1:3")["sync_modes"]
    found = {(mode["sync"], mode["devices"]): mode for mode in modes}
    direct, reshard = found["direct", "full"], found["reshard", "full"]
    assert direct["max_bytes"] <= 0.80 * reshard["max_bytes"]
    assert direct["max_domain_bytes"] == 0 < reshard["max_domain_bytes"]
    assert direct["max_messages"] > reshard["max_messages"]
    assert direct["max_communicators"] > reshard["max_communicators"] == 4
    assert [mode["num_devices"] for mode in modes] == [8, 7, 8, 7]
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert [key for key in direct if f"`{key}`" not in text] == []


FOUR = ["--replicas", "4"]
ZERO = ["--model", "llama3-8b", "--tp", "4", "--replicas", "4", "--dead", "1:3", "--optimizer", "zero1"]


def test_sharded_optimizer_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches moments, bytes or moves that are those of all holders still, and a mode that is not in the tables."""
    whole, found = planned(capsys, *ZERO[:-2]), planned(capsys, *ZERO)
    assert found["optimizer"] == {"mode": "zero1", "knows_domains": False, "exposed": []}
    assert whole["optimizer"] == {"mode": "replicated"}
    moments = [sum(d["memory"]["moments_bytes"] for d in each["devices"]) for each in (whole, found)]
    params = found["model"]["num_params"]
    assert moments[1] == 2 * 2 * 4 * params  # two moments on two devices
    assert moments[0] >= 2 * 4 * 4 * params  # four holders, and those of what replica 1 holds twice
    sent = [sum(d["traffic"]["total_bytes"] for d in each["devices"]) for each in (whole, found)]
    assert sent[1] == pytest.approx(sent[0], rel=1e-3)
    first = found["devices"][0]["traffic"]
    assert first["total_bytes"] == sum(value for key, value in first.items() if key.endswith("_bytes")) / 2
    assert first["gathered_bytes"] > 0 == whole["devices"][0]["traffic"]["gathered_bytes"]
    assert {group["by"] for group in found["sync_groups"]} == {"owners"}
    assert set(found["transfers"]["moves"][0]) == {"source", "target", "num_bytes"}
    assert sum(move["num_bytes"] for move in found["transfers"]["moves"]) == found["transfers"]["bytes"] > 0
    out = plan(capsys, *ZERO)
    assert "weights" in out
    assert "Gradient exchange" not in out


@pytest.mark.parametrize(
    ("argv", "why", "words"),
    [
        (["--domain-size", "4"], set(), "mirror in another replica and another domain"),
        (["--domain-size", "8"], set(), "mirror in another replica and another domain"),
        (["--domain-size", "16"], {"same domain"}, "owner and mirror in one domain"),
        ([], set(), "--domain-size says so"),
        (["--replicas", "1"], {"no mirror"}, "have no mirror"),
    ],
    ids=["a domain each", "two a domain", "one domain", "unknown", "one replica"],
)
def test_what_zero1_falls_back_to_is_said(
    argv: list[str], why: set[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a loss that needs a checkpoint and was not named in advance, and one that does not but is."""
    asked = ["--model", "demo", "--tp", "4", "--optimizer", "zero1", *([] if "--replicas" in argv else FOUR), *argv]
    found = planned(capsys, *asked)["optimizer"]
    assert {exposed["why"] for exposed in found["exposed"]} == why
    assert found["knows_domains"] == ("--domain-size" in argv)
    text = " ".join(plan(capsys, *asked).split())
    assert words in text
    assert ("newest checkpoint" in text) == bool(why)


def test_documented_keys() -> None:
    """Catches a top-level key without a line in the documentation."""
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert [key for key in KEYS if f"| `{key}` |" not in text] == []


@pytest.mark.parametrize("columns", ["80", "40"])
def test_tables_fit(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a section that is missing, and lines that a narrow terminal breaks."""
    monkeypatch.setenv("COLUMNS", columns)
    out = plan(capsys, "--model", "llama3-70b", *ISSUE)
    for title in (
        "Replicas",
        "Units of replicas 0, 3",
        "To move",
        "GiB per device",
        "MiB sent per",
        "Gradient exchange",
        "Sync groups",
    ):
        assert title in out
    assert max(map(len, out.splitlines())) <= int(columns)
    if columns == "80":
        assert "0-7, 24, 31" in out  # the two orphans that slot 0 of replica 1 took over
        assert "0-1,3:0; 2:1" in out


@pytest.mark.parametrize("layout", [["--tp", "8", "--replicas", "16"], ["--tp", "32", "--replicas", "4"]])
def test_large_layout_stays_legible(layout: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tables with a row for each of 128 devices."""
    out = plan(capsys, "--model", "llama", *layout, "--dead", "1:3", "--dead", "2:0", "--dead", "2:5", "--dead", "3:7")
    assert "124 of 128 devices" in out
    assert len(out.splitlines()) < 200


def test_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches transfers, dead slots or uneven loads in a plan where nobody is dead."""
    found = planned(capsys, "--model", "demo", "--tp", "4", "--replicas", "2")
    assert found["transfers"]["moves"] == []
    assert {replica["num_sequences"] for replica in found["replicas"]} == {16}
    assert len(found["sync_groups"]) == 4
    assert "no slot is dead" in plan(capsys, "--model", "demo", "--tp", "4", "--replicas", "2")


def test_lost_units_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an error, or a silent zero, where a unit has no holder left and only a checkpoint helps."""
    argv = ["--model", "tiny", "--tp", "4", "--dead", "0:2"]
    found = planned(capsys, *argv)["transfers"]
    assert found["bytes"] is None
    assert found["lost_units"]["head"] == [2]
    assert "checkpoint" in plan(capsys, *argv)


def test_replica_that_leaves_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a replica that vanishes from the tables without a word."""
    dead = [part for slot in range(1, 8) for part in ("--dead", f"1:{slot}")]
    out = plan(capsys, "--model", "llama", "--tp", "8", "--replicas", "4", "--sequences", "4", *dead)
    assert "replica 1 left out" in out


def test_flags_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is parsed and forgotten, and a model directory that is not read."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    more = {"model_type": "qwen2", "vocab_size": 300, "num_hidden_layers": 3, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **more}))
    flags = ["--sequences", "11", "--micro-batch", "3", "--bucket-mb", "0.01", "--dtype", "float64"]
    found = planned(capsys, "--model", str(tmp_path), "--tp", "2", "--replicas", "2", *flags)
    assert found["model"]["num_layers"] == 3
    assert found["layout"] == {
        "tp": 2,
        "replicas": 2,
        "dead": [],
        "num_devices": 4,
        "sequences": 11,
        "seq_len": 512,
        "micro_batch": 3,
        "bucket_mb": 0.01,
        "dtype": "float64",
        "activation_checkpointing": False,
        "sequence_parallel": False,
        "domain_size": None,
        "topology": None,
    }
    coarse = planned(capsys, "--model", str(tmp_path), "--tp", "2", "--replicas", "2", "--sequences", "11")
    first, other = found["devices"][0], coarse["devices"][0]
    assert first["memory"]["params_bytes"] == 2 * other["memory"]["params_bytes"]
    assert first["flops_per_step"] == 6 * first["flops_per_sequence"]
    # fewer micro-batches, more buckets
    assert first["traffic"]["num_collectives"] != other["traffic"]["num_collectives"]


BAD = {
    "unknown model": (["--model", "lama"], ["'lama'", "nearest name is llama"]),
    "no such directory": (["--model", "./nowhere"], ["./nowhere", "does not exist"]),
    "no causal LM": (["--model", "t5"], ["t5", "no causal LM"]),
    "no attention heads": (["--model", "mamba"], ["mamba", "no attention heads"]),
    "heads that differ by layer": (["--model", "gemma4_text"], ["gemma4_text", "differ from layer to layer"]),
    "heads nowhere": (["--model", "dots3_note_text"], ["dots3_note_text", "no attention heads of its own"]),
    "fields that do not fit": (["--model", "reformer"], ["reformer", "cannot build", "is_decoder"]),
    "model without a plan": (["--model", "gpt2"], ["GPT2LMHeadModel"]),
    "tp larger than heads": (["--model", "tiny", "--tp", "5"], ["TP 5", "4 units of kind 'head'", "at most 4"]),
    "slot does not exist": (["--model", "tiny", "--tp", "4", "--dead", "0:4"], ["0:4", "slots 0..3"]),
    "replica does not exist": (["--model", "tiny", "--tp", "4", "--dead", "1:0"], ["1:0", "replicas 0..0"]),
    "not a slot": (["--model", "tiny", "--dead", "three"], ["'three'", "replica:slot"]),
    "all dead": (["--model", "tiny", "--tp", "1", "--replicas", "2", "--dead", "0:0"], ["all 1 slots of replica 0"]),
    "tp 0": (["--model", "tiny", "--tp", "0"], ["--tp is 0", "1 or more"]),
    "no replicas": (["--model", "tiny", "--replicas", "0"], ["--replicas is 0", "1 or more"]),
    "one token": (["--model", "tiny", "--seq-len", "1"], ["--seq-len is 1", "2 or more"]),
    "micro-batch 0": (["--model", "tiny", "--micro-batch", "0"], ["--micro-batch is 0", "1 or more"]),
    "domain of nothing": (
        ["--model", "tiny", "--domain-size", "0"],
        ["--domain-size is 0", "1 or more"],
    ),
    "bucket of nothing": (["--model", "tiny", "--bucket-mb", "0"], ["--bucket-mb is 0.0", "above 0"]),
    "bucket not a number": (["--model", "tiny", "--bucket-mb", "nan"], ["--bucket-mb is nan", "above 0"]),
    "batch too small": (["--model", "tiny", "--replicas", "3", "--sequences", "2"], ["--sequences is 2", "3 replicas"]),
    "far too many": (["--model", "tiny", "--replicas", "1000000000"], ["1000000000", "65536"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches bad input that is planned, ends in a traceback, or is refused without value, limit and remedy."""
    argv, parts = BAD[case]
    assert run(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    message = " ".join(captured.err.split())
    assert message.startswith("runflat plan: ")
    assert message.endswith(".")
    assert "\n\n" not in captured.err
    assert "Traceback" not in captured.err
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("{", ["config.json", "JSON"], id="not JSON"),
        pytest.param("[]", ["config.json", "no model_type"], id="not an object"),
        pytest.param('{"hidden_size": 64}', ["config.json", "no model_type"], id="no type"),
        pytest.param('{"model_type": "lamma"}', ["'lamma'", "nearest name is llama"], id="unknown type"),
        pytest.param('{"model_type": "llama", "hidden_size": "64"}', ["hidden_size", "expected int"], id="wrong type"),
        pytest.param('{"model_type": "llama", "hidden_size": 65}', ["65", "multiple"], id="heads do not divide"),
        pytest.param('{"model_type": "llama", "num_key_value_heads": 5}', ["32 query heads", "5 KV"], id="KV heads"),
        pytest.param(None, ["no config.json"], id="no file"),
    ],
)
def test_bad_model_directory(
    text: str | None, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback of transformers for a model directory that is incomplete or wrong."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert run(["plan", "--model", str(tmp_path), "--tp", "1"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith("runflat plan: ")
    assert all(part in message for part in parts)


@pytest.mark.parametrize("argv", [["--tpp", "4"], ["--tp", "four"], ["--dtype", "float16"], []])
def test_bad_flags(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is misspelt or has no such value and is taken, or a missing model."""
    with pytest.raises(SystemExit) as info:
        run(["plan", *(["--model", "tiny"] if argv else []), *argv])
    assert info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    """Catches help that takes seconds because it loads torch, or that has no example and no word on a flag."""
    program = (
        "import sys; from runflat.cli import run\n"
        "try: run(['plan', '--help'])\n"
        "except SystemExit as end: sys.exit(end.code or ('torch' in sys.modules and 'torch was loaded'))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    for word in ("Example: runflat plan --model", "--dead", "replica:slot", "--json", "--bucket-mb"):
        assert word in done.stdout
