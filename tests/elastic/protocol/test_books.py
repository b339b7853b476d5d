"""Steps, samples and checkpoints, from reports that come late, twice, or never."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runflat.elastic.books import Books, RunFacts
from runflat.elastic.messages import Commit, Shard, StepReport
from runflat.elastic.orders import Resume
from runflat.elastic.planning import Planner
from runflat.errors import CheckpointError, RunError
from runflat.plan.plan import Plan
from runflat.train.checkpoint import Progress, newest_checkpoint, written_units
from runflat.train.publishing import partial_folder

ALL = [f"{replica}:{slot}" for replica in range(2) for slot in range(4)]


class Silent:
    """Nobody watches."""

    def step(self, record: Mapping[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def waiting(self, text: str | None) -> None: ...


def hashed(previous: str, step: int, samples: Sequence[int]) -> str:
    return f"{previous}/{step}:{samples[0]}-{samples[-1]}"


@pytest.fixture
def plan(make_planner: Callable[..., Planner]) -> Plan:
    planner = make_planner()
    return planner.plan(planner.decide(ALL, None), 0, None)


@pytest.fixture
def books(tmp_path: Path, make_planner: Callable[..., Planner], plan: Plan) -> Iterator[Books]:
    facts = RunFacts(tmp_path, make_planner().spec, 16, 8, hashed, lambda step: 0.25, make_planner().step_work)
    made = Books(facts, Progress(0, 0, 0, ""), Silent())
    made.adopt(plan)
    yield made
    made.close()


def report(step: int, replica: int, **fields: Any) -> StepReport:
    values = {"first_sample": 8 * step + 4 * replica, "num_samples": 4, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    values |= {"num_target_tokens": 5, "skipped": False, "compute_s": 0.1 * (replica + 1), "sync_s": 0.0, "step_s": 0.3}
    return StepReport(incarnation=0, generation=0, step=step, replica=replica, **{**values, **fields})


def lines(books: Books) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (books.facts.run / "steps.jsonl").read_text().splitlines()]


def test_a_step_is_written_when_all_replicas_have_reported(books: Books) -> None:
    """Catches a record that leaves a replica out, and steps that are written out of order."""
    books.take("0:0", report(0, 0), 1.0)
    assert lines(books) == []
    books.take("0:0", report(1, 0), 1.1)
    books.take("1:0", report(1, 1), 1.1)
    assert lines(books) == []
    books.take("1:0", report(0, 1), 1.2)
    assert [line["step"] for line in lines(books)] == [0, 1]
    assert books.sample_hash == "/0:0-7/1:8-15"
    assert books.waited_s == {0: pytest.approx(0.1), 1: 0.0}


@pytest.mark.parametrize("wrong", [{"first_sample": 4}, {"num_samples": 3}])
def test_samples_used_twice_or_left_out_stop_the_run(books: Books, wrong: dict[str, int]) -> None:
    """Catches a worker that reads from the wrong place in the data."""
    books.take("1:0", report(0, 1), 1.0)
    with pytest.raises(RunError, match=r"0\.\.7 were due"):
        books.take("0:0", report(0, 0, **wrong), 1.0)


def test_a_lost_report_is_made_up_from_the_barrier(books: Books) -> None:
    """Catches a committed step that is missing because the device that would have reported it died."""
    scalars = (8.0, 20.0, 10.0, 16.0, 0.0, 0.0, 0.0)
    books.take("0:0", report(0, 0), 1.0)
    books.take("0:0", Commit(incarnation=0, generation=0, step=1, scalars=scalars), 1.0)
    books.settle(2, None, 0, 1.0)
    first, second = lines(books)
    assert [replica["compute_s"] for replica in first["replicas"]] == [0.1, None]
    assert (second["loss"], second["grad_norm"], second["lr"], second["step_s"]) == (2.0, 0.4, 0.25, None)
    assert books.num_samples == 16
    books.take("1:0", report(1, 1), 1.3)
    assert len(lines(books)) == 2, "a report that comes after all is not a second step"


def test_steps_that_workers_finished_alone_get_a_line_each(books: Books, plan: Plan) -> None:
    """Catches committed steps without a line after the controller was killed, and lines that are written twice."""
    for replica in range(2):
        books.take(f"{replica}:0", report(0, replica), 1.0)
    books.close()
    for _ in range(2):
        resumed = Books(books.facts, Progress(3, 3, 24, "h"), Silent())
        resumed.catch_up(plan)
        resumed.close()
    known = [(row["step"], row["generation"], sum(r["num_samples"] for r in row["replicas"])) for row in lines(books)]
    assert known == [(0, 0, 8), (1, 0, 8), (2, 0, 8)]
    assert [row["loss"] for row in lines(books)] == [2.0, None, None]
    assert (resumed.step, resumed.num_samples, resumed.sample_hash) == (3, 24, "h")


def test_going_back_forgets_steps_and_their_samples(books: Books) -> None:
    """Catches steps that count twice after a checkpoint was loaded."""
    for step in range(4):
        for replica in range(2):
            books.take(f"{replica}:0", report(step, replica), 1.0)
    before = books.sample_hash
    books.go_back(Resume(action="memory", committed=2), 1)
    assert [line["step"] for line in lines(books)] == [0, 1]
    assert books.num_samples == 16
    for step in (2, 3):
        for replica in range(2):
            books.take(f"{replica}:0", report(step, replica), 2.0)
    assert [line["step"] for line in lines(books)] == [0, 1, 2, 3]
    assert books.sample_hash == before


def shard(books: Books, plan: Plan, device: str, step: int = 3) -> Shard:
    """What a device says of a shard that it has written."""
    place = plan.place(device)
    assert place is not None
    folder = partial_folder(books.facts.run, step, plan.generation)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"shard-{place[0]}-{place[1]}.safetensors"
    (folder / name).write_bytes(device.encode())
    units = written_units(books.facts.spec, plan, place)
    axes = {kind: [[unit, unit + 1] for unit in held] for kind, held in units.items()}
    entry = {"name": name, "sha256": hashlib.sha256(device.encode()).hexdigest(), "num_bytes": 3}
    progress = {"step": step, "optimizer_step": step, "num_samples": 8 * step, "sample_hash": "h"}
    return Shard(
        incarnation=0,
        generation=plan.generation,
        progress=progress,
        shard={**entry, "axes": axes, "replicated": device == "0:0"},
    )


def test_a_checkpoint_is_published_when_its_last_shard_is_reported(books: Books, plan: Plan) -> None:
    """Catches a checkpoint that is visible before it is whole."""
    for device in ALL[:-1]:
        assert books.take(device, shard(books, plan, device), 1.0) is None
    assert list((books.facts.run / "checkpoints").glob("step-*")) == []
    published = books.take(ALL[-1], shard(books, plan, ALL[-1]), 1.0)
    assert published is not None
    assert published[0] == 3
    assert newest_checkpoint(books.facts.run, pytest.fail).progress.step == 3


def test_shards_of_two_generations_do_not_make_a_checkpoint(books: Books, plan: Plan) -> None:
    """Catches a checkpoint put together before and after a loss."""
    later = replace(plan, generation=1)
    books.adopt(later)
    for device in ALL[:5]:
        books.take(device, shard(books, plan, device), 1.0)
    for device in ALL[4:]:
        assert books.take(device, shard(books, later, device), 1.0) is None


def test_a_save_that_is_complete_late_does_no_harm(books: Books, plan: Plan) -> None:
    """Catches an older save published over a newer one, or a run that stops because its folder is gone by then."""
    later = replace(plan, generation=1)
    books.adopt(later)
    late = [shard(books, plan, device) for device in ALL]
    for device, message in zip(ALL[:5], late, strict=False):
        books.take(device, message, 1.0)
    for device in ALL:
        books.take(device, shard(books, later, device), 1.0)
    for device, message in zip(ALL[5:], late[5:], strict=True):
        assert books.take(device, message, 1.0) is None
    assert newest_checkpoint(books.facts.run, pytest.fail).generation == 1


def test_a_shard_that_could_not_be_written_stops_the_run(books: Books, plan: Plan) -> None:
    """Catches a full disk that is only noticed when somebody wants to resume."""
    failed = shard(books, plan, "0:1").model_copy(update={"error": "No space left on device"})
    with pytest.raises(CheckpointError, match="No space left"):
        books.take("0:1", failed, 1.0)
