"""What `runflat train` does with a run's folder before the first worker starts."""

import json
from pathlib import Path

import pytest

from runflat.commands.prepare import claimed, end_line, steps_before
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


def test_a_line_that_was_cut_is_ended(tmp_path: Path) -> None:
    """Catches the first event of a resumed run written behind half a line, so that nobody can read it."""
    events = tmp_path / "events.jsonl"
    end_line(events)
    assert not events.exists()
    for text, ended in (("", ""), ("a\n", "a\n"), ('a\n{"cut', 'a\n{"cut\n')):
        events.write_text(text)
        end_line(events)
        assert events.read_text() == ended
