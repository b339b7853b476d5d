"""Files that the agent trusts: the limits file, the journal, the log; and the example that comes with it."""

import json
import os
from pathlib import Path

import pytest

from runflat.errors import PowerError
from runflat.power.audit import MAX_REFUSALS, WINDOW_S, AuditLog
from runflat.power.journal import FileJournal, JournalError, Owed
from runflat.power.site import check_folders, read_site

ROOT = Path(__file__).parents[2]
GOOD = {"allow_uids": [1001], "devices": {"GPU-a": {"nominal_w": 960, "ceiling_w": 1150}}}
OWED = Owed(nominal_w=960.0, from_w=960.0, to_w=1010.0, energy_j=5.0)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """A limits file."""
    path.write_text(text)
    path.chmod(mode)
    return path


def test_limits_file(tmp_path: Path) -> None:
    """Catches a default that gives more than was written down, and an example that is refused."""
    site = read_site(write(tmp_path / "power.json", json.dumps(GOOD)))
    assert (site.max_lease_s, site.budget_w, site.devices["GPU-a"].low_w) == (60.0, None, 960.0)
    example = (ROOT / "examples" / "power_agent" / "power.json").read_text()
    assert read_site(write(tmp_path / "example.json", example)).budget_w == 8000.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"allow_uids": []}, "allow_uids"),
        ({"max_lease_s": 0}, "max_lease_s"),
        ({"devices": {}}, "devices"),
        ({"device": {}}, "device"),
        ({"budget_w": 959}, "nominal limits"),
        ({"devices": {"GPU-a": {"nominal_w": 960, "ceiling_w": 900}}}, "nominal"),
        ({"devices": {"GPU-a": {"nominal_w": 960, "ceiling_w": 1000, "floor_w": 970}}}, "nominal"),
        ({"devices": {"MIG-a": {"nominal_w": 960, "ceiling_w": 1000}}}, "MIG-a"),
        ({"devices": {"GPU-a": {"nominal_w": -1, "ceiling_w": 1000}}}, "nominal_w"),
    ],
)
def test_wrong_limits(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """Catches a limits file that is half understood; the words must name what is wrong."""
    with pytest.raises(PowerError, match=words):
        read_site(write(tmp_path / "power.json", json.dumps(GOOD | change)))


def test_file_that_cannot_be_trusted(tmp_path: Path) -> None:
    """Catches limits that somebody other than root can set: by writing, by a link, by replacing the file."""
    good = write(tmp_path / "power.json", json.dumps(GOOD))
    for mode in (0o620, 0o602):
        good.chmod(mode)
        with pytest.raises(PowerError, match="written by others"):
            read_site(good)
    good.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(good)
    with pytest.raises(PowerError, match="cannot be read"):
        read_site(link)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(PowerError, match="plain file"):
        read_site(tmp_path / "fifo")
    with pytest.raises(PowerError, match="cannot be read"):
        read_site(tmp_path / "none")
    with pytest.raises(PowerError, match="the file"):
        read_site(write(tmp_path / "broken", "{"))
    tmp_path.chmod(0o777)
    with pytest.raises(PowerError, match="written by others"):
        read_site(good)
    with pytest.raises(PowerError, match="written by others"):
        check_folders(tmp_path)
    tmp_path.chmod(0o700)
    read_site(good)


def test_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches trust in a file because of its mode alone: its owner can change it at any time."""
    good = write(tmp_path / "power.json", json.dumps(GOOD))
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        return os.stat_result([*real(descriptor)[:4], os.geteuid() + 7, *real(descriptor)[5:10]])

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(PowerError, match="belongs to user"):
        read_site(good)


def test_journal_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a journal that a crash or a full disk leaves half written."""
    journal = FileJournal(tmp_path / "journal.json")
    assert journal.load() == {}
    journal.save({"GPU-a": OWED})
    assert journal.load() == {"GPU-a": OWED}
    assert (tmp_path / "journal.json").stat().st_mode & 0o077 == 0

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((os, "fsync"), (Path, "rename")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, fail)
            with pytest.raises(OSError, match="No space"):
                journal.save({"GPU-b": OWED})
        assert journal.load() == {"GPU-a": OWED}
    journal.save({})
    assert journal.load() == {}


def test_journal_reaches_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a write that a power cut could undo: content first, then the name, then the folder."""
    order: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), real_fsync(descriptor))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append("rename"), real_rename(self, to))[1])
    FileJournal(tmp_path / "journal.json").save({"GPU-a": OWED})
    assert order == ["fsync", "rename", "fsync"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"GPU-a": {"nominal_w": 960}}', '{"GPU-a": {"nominal_w": "x"}}'])
def test_damaged_journal(tmp_path: Path, text: str) -> None:
    """Catches a journal that is misread as empty: what it said would be forgotten."""
    (tmp_path / "journal.json").write_text(text)
    with pytest.raises(JournalError):
        FileJournal(tmp_path / "journal.json").load()


def test_log_is_appended_and_cannot_be_flooded(tmp_path: Path) -> None:
    """Catches a log that starts anew with each agent, or that a caller can fill the disk with."""
    now = [1000.0]
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        log = AuditLog(path, lambda: now[0])
        log("set", {"uuid": "GPU-a"})
        log.close()
    log = AuditLog(path, lambda: now[0])
    for _ in range(1000):
        log("refused", {"text": "no\nno"})
    log("set", {"uuid": "GPU-b"})
    now[0] += WINDOW_S
    log("refused", {"text": "again"})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines].count("refused") == MAX_REFUSALS + 1
    assert lines[-2]["uuid"] == "GPU-b"
    assert lines[-1]["refusals_not_written"] == 1000 - MAX_REFUSALS
    assert lines[0]["time"].startswith("1970-01-01T00:16:40")
