"""What `runflat train` does with a run's folder before the first worker starts."""

import json
from pathlib import Path

import pytest

from runflat.commands.prepare import claimed, steps_before
from runflat.errors import ConfigError


def test_one_controller_per_folder(tmp_path: Path) -> None:
    """Catches two controllers that write into one run: the second would drop the records of the first."""
    with claimed(tmp_path), pytest.raises(ConfigError, match="in use"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_damaged_records_do_not_block_a_resume(tmp_path: Path) -> None:
    """Catches a resume that ends in a traceback because a line of steps.jsonl was cut off or overwritten."""
    steps = tmp_path / "steps.jsonl"
    steps.write_bytes(b'{"step": 0}\ngarbage\n[]\n\xff\xfe\n{"step": 1}\n{"step": 7}\n{"step": 2')
    kept = [json.loads(line)["step"] for line in steps_before(steps, 3)]
    assert kept == [0, 1]
