"""Configuration: file, flags and constructor agree, and each help text is there."""

import json
from pathlib import Path
from typing import Any

import pytest
import tyro
from pydantic import ValidationError

from runflat.commands.config_files import config_error, flag_rules, load_config
from runflat.config import LayoutSection, ModelSection, Section, TrainConfig, TrainSection
from runflat.errors import ConfigError
from runflat.presets import preset_names, read_preset

EXAMPLES = Path(__file__).parents[1] / "examples"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def from_flags(*flags: str, default: TrainConfig | None = None) -> TrainConfig:
    with flag_rules():
        return tyro.cli(TrainConfig, default=default or TrainConfig(), args=flags)


def test_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    """Catches a file that is read by tyro's or pydantic's lax rules, or that replaces whole sections by defaults."""
    path = write(
        tmp_path, '[layout]\ntp = 4\nreplicas = 2\ndead = ["1:3"]\n[train]\nlr = 1\n[model]\ndir = "some/model"'
    )
    config = load_config(path)
    assert config.layout == LayoutSection(tp=4, replicas=2, dead=("1:3",))
    assert config.train == TrainSection(lr=1.0)
    assert config.model.dir == Path("some/model")
    assert load_config(None) == TrainConfig()


def test_flags_change_single_fields_of_a_file(tmp_path: Path) -> None:
    """Catches flags that reset the other fields of their section, and repeated --layout.dead that keeps only one."""
    default = load_config(write(tmp_path, "[layout]\nreplicas = 3\n[train]\nsteps = 7"))
    flags = "--layout.tp 4 --layout.dead 1:3 --layout.dead 2:0 --train.dtype float64 --model.preset demo --run out"
    config = from_flags(*flags.split(), "--data.paths", "a", "b", default=default)
    assert config.layout == LayoutSection(tp=4, replicas=3, dead=("1:3", "2:0"))
    assert config.train == TrainSection(steps=7, dtype="float64")
    assert config.model == ModelSection(preset="demo")
    assert config.data.paths == ("a", "b")
    assert config.run == Path("out")
    assert config.resume is None


def test_dead_flags_add_to_the_file() -> None:
    """Catches a flag that revives the slots which the file says are dead."""
    default = TrainConfig(layout=LayoutSection(tp=4, dead=("0:1",)))
    assert from_flags("--layout.dead", "0:2", default=default).layout.dead == ("0:1", "0:2")


def test_bad_flag_value_is_a_config_error() -> None:
    """Catches tyro swallowing our errors: it prints any ValueError as a raw report and exits."""
    with pytest.raises(ConfigError, match=r"layout\.tp is 0: it must be greater than or equal to 1\.$"):
        from_flags("--layout.tp", "0")
    with pytest.raises(ConfigError, match=r"layout\.dead names 7:7, .* slots are 0:0 to 0:0"):
        from_flags("--layout.dead", "7:7")


def test_unknown_flag_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an unknown flag that is ignored."""
    with pytest.raises(SystemExit) as exit_info:
        from_flags("--layout.tpp", "4")
    assert exit_info.value.code == 2
    assert "--layout.tp" in capsys.readouterr().err


def sections() -> dict[str, type[Section]]:
    inner: dict[str, Any] = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    return {
        name: section for name, section in inner.items() if isinstance(section, type) and issubclass(section, Section)
    }


def test_help_shows_the_text_of_each_field(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a field without a text, and help that loses the texts on the way through tyro."""
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit):
        from_flags("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    every: dict[str, type[Section]] = {"": TrainConfig, **sections()}
    for prefix, section in every.items():
        for name, field in section.model_fields.items():
            if name in sections():
                continue
            assert field.description, f"{prefix}.{name} has no text"
            assert " ".join(field.description.split()) in shown
            assert f"--{prefix}.{name}".replace("--.", "--").replace("_", "-") in shown


def test_frozen() -> None:
    """Catches a configuration that changes after its checks."""
    layout: Any = TrainConfig().layout
    with pytest.raises(ValidationError, match="frozen"):
        layout.tp = 3


def test_dead_slots_are_read_as_numbers() -> None:
    """Catches "01:3" and "1:3" being two different slots."""
    layout = LayoutSection(tp=4, replicas=2, dead=("01:3",))
    assert layout.dead == ("1:3",)
    assert layout.dead_slots == ((1, 3),)
    assert layout.num_devices == 7
    with pytest.raises(ValidationError, match="more than once"):
        LayoutSection(tp=4, replicas=2, dead=("01:3", "1:3"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"on_failure": "spare,nip"}, "unknown strategy 'nip'"),
        ({"spares": 2}, "spares is 2, but on_failure is 'ntp,drop', which never uses a spare; write spare,ntp,drop"),
        ({"on_failure": "restart", "train": {"memory_every": 0}}, "never a checkpoint to start again from"),
        ({"cap": 4}, "cap is 4, but rule is constant"),
        ({"rule": "capped", "cap": 4}, "at most 4 sequences, but train.global_batch is 8"),
        ({"rule": "shrink"}, "rule"),
        ({"power": {"curve": "cube"}}, "power.curve is cube, but nothing steers power"),
        ({"device": {"curve": "cube"}}, "device.curve is cube, but devices are not emulated"),
    ],
)
def test_strategies_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    """Catches a chain or a batch rule that is only found out to be useless at the first loss."""
    with pytest.raises(ValidationError) as info:
        TrainConfig.model_validate(values)
    message = str(config_error(info.value, TrainConfig))
    assert said in message
    assert "\n" not in message


def test_config_error_of_a_section_names_keys_from_the_top() -> None:
    """Catches messages about `steps` that do not say which section it is in."""
    with pytest.raises(ValidationError) as info:
        TrainSection(steps=0, lr=-1.0)
    message = str(config_error(info.value, TrainSection, source="The section"))
    assert message.startswith("The section is not valid: train.steps is 0")
    assert "train.lr is -1.0" in message
    assert "\n" not in message


def test_overrides_have_the_names_of_config_json() -> None:
    """Catches an override that does not reach the model, because its Hugging Face name is wrong."""
    fields = ModelSection.model_fields.keys() - {"preset", "dir", "from_dir", "arch", "attention", "tie_embeddings"}
    section = ModelSection.model_validate({name: 4 for name in fields} | {"tie_embeddings": False})
    assert len(section.overrides) == len(fields) + 1
    assert section.overrides.keys() - {"head_dim"} <= read_preset("llama3-8b").keys()


@pytest.mark.parametrize("path", [EXAMPLES / "demo.toml", EXAMPLES / "tiny.toml"], ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    """Catches an example that drifts from the configuration, or whose preset does not exist."""
    config = load_config(path)
    assert config.model.preset is not None
    shape = read_preset(config.model.preset)
    assert shape["num_attention_heads"] >= config.layout.tp


def test_demo_is_the_promised_layout() -> None:
    """Catches a demo that no longer shows two degrees at once, or is too small to count as a model."""
    config = load_config(EXAMPLES / "demo.toml")
    assert (config.layout.tp, config.layout.replicas, config.layout.dead_slots) == (4, 2, ((1, 3),))
    assert config.train.steps >= 60
    assert num_parameters(read_preset("demo")) >= 2_500_000


def num_parameters(shape: dict[str, Any]) -> int:
    """Parameters of a Llama or Qwen2 shape without tied embeddings."""
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    kv_width = hidden // heads * kv_heads
    bias = hidden + 2 * kv_width if shape["model_type"] == "qwen2" else 0
    attention = 2 * hidden * hidden + 2 * hidden * kv_width + bias
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return int(shape["num_hidden_layers"] * layer + hidden + 2 * shape["vocab_size"] * hidden)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen2-7b", 7_615_616_512),
        ("demo", 2_755_200),
        ("tiny", 131_520),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, published: int) -> None:
    """Catches a typing error in a shape: the numbers are those of the models' safetensors on their hub pages."""
    assert num_parameters(read_preset(name)) == published


def test_each_preset_is_known_by_its_file_name() -> None:
    """Catches a preset that the package does not ship, or the preset flag naming one that is not there."""
    assert {"tiny", "demo"} < set(preset_names())
    assert all(json.dumps(read_preset(name)) for name in preset_names())
    with pytest.raises(KeyError):
        read_preset("llama9")
