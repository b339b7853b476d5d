"""Steps of several devices as threads: they resume where they were, and all devices agree on what a step did.

With `zero1` they do the same from sharded optimizer state, and checkpoints of the two kinds stand for each other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from runflat.check.ranks import run_ranks
from runflat.parallel.casts import lift_forward
from runflat.parallel.comms import Comms
from runflat.parallel.optimizer import OptimizerSettings
from runflat.parallel.shard import ShardedModel, initial_weights
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.batch import micro_batches
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.zero import OptimizerMode, ownership
from runflat.train.checkpoint import Checkpoint, Progress, ShardFile, newest_checkpoint
from runflat.train.data import Corpus, prepare
from runflat.train.publishing import publish
from runflat.train.shards import checkpoint_tensors, write_shard
from runflat.train.step import Scalars, StepResult, Trainer, apply, backward, barrier
from runflat.train.updater import Updater

Layout = tuple[int, int, tuple[Place, ...]]
HURT: Layout = (2, 2, ((1, 0),))
OTHERS: dict[str, Layout] = {"one device": (1, 1, ()), "whole": (2, 2, ()), "uneven": (3, 1, ((0, 1),))}
BATCH = 6
STEPS = 6
SAVED = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Returns some text as sequences of 12 tokens."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(200)), encoding="utf-8")
    return prepare([str(folder)], cache_dir=folder / "tokens", seq_len=12)


@dataclass(frozen=True)
class Ended:
    """What one device knows at the end: its results, its shard's bits, and the index entry of what it saved."""

    results: tuple[StepResult, ...]
    scalars: tuple[Scalars, ...]
    state: dict[str, torch.Tensor]
    shard: ShardFile | None


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=257,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
    )


def own_batches(corpus: Corpus, plan: Plan, number: int, step: int, micro_batch: int) -> list[torch.Tensor]:
    """Returns the micro-batches of replica `number` in `step`."""
    offset = step * BATCH + sum(r.num_sequences for r in plan.replicas if r.replica < number)
    own = torch.from_numpy(corpus.train_sequences(offset, plan.replica(number).num_sequences))
    return list(own.split(list(micro_batches(len(own), micro_batch))))


def copied(updater: Updater, optimizer_step: int) -> dict[str, torch.Tensor]:
    """Returns copies of weights, moments and step counts."""
    tensors = updater.state(optimizer_step).tensors
    state = {f"{kind} {name}": tensor.clone() for kind, named in tensors.items() for name, tensor in named.items()}
    return state | {f"{n} step": of["step"] for n, of in enumerate(updater.adamw.state.values())}


def train(
    corpus: Corpus,
    layout: Layout,
    run: Path,
    *,
    start: Checkpoint | None = None,
    save_at: int | None = None,
    steps: int = STEPS,
    micro_batch: int = 2,
    before: Callable[[Place, int, Trainer], bool] = lambda *_: False,
    optimizer: OptimizerMode = "replicated",
) -> dict[Place, Ended]:
    """Train from scratch or from `start` up to step `steps`; `before` sees each step and may ask to stop after it."""
    tp, replicas, dead = layout
    rules = read_rules(build_meta_model(model_config(), torch.float64), tp)
    spec = rules.spec
    plan = build_plan(spec, live_devices(tp, replicas, dead), tp, BATCH, corpus.seq_len)
    sync = sync_layout(spec, plan, 1 << 12, 8)
    owned = ownership(spec, plan, sync) if optimizer == "zero1" else None
    models = {place: build_meta_model(model_config(), torch.float64) for place in plan.places}
    settings = OptimizerSettings(lr=1e-2, warmup_steps=2, total_steps=STEPS, clip_norm=0.5)
    first = start.progress.step if start else 0

    def rank(place: Place, comms: Comms) -> Ended:
        model, replica = models[place], plan.replica(place[0])
        held = replica.held(spec.kinds, place[1])
        source = checkpoint_tensors(start, "weight") if start else initial_weights(model, 0)
        sharded = ShardedModel(model, rules, held, comms.tp, source, torch.float64, torch.device("cpu"))
        params = sharded.params
        lift_forward(model)
        updater = Updater(spec, params, held, settings, owned.kept(place) if owned else None)
        if start:
            updater.load(start)
        sums = updater.sync(plan, sync, owned, place, comms, sharded.sources)
        trainer = Trainer(model, params, sums, comms, updater.adamw, settings, place[1] == replica.live_slots[0])
        results: list[StepResult] = []
        scalars: list[Scalars] = []
        shard = None
        for step in range(first, steps):
            batches = own_batches(corpus, plan, place[0], step, micro_batch)
            stop = before(place, step, trainer)
            loss_sum, tokens = backward(trainer, batches, batches)
            sums.finish()
            scalars.append(barrier(trainer, loss_sum, tokens, stop=stop))
            results.append(apply(updater.adamw, settings, scalars[-1], step))
            sums.gather()
            if step + 1 == save_at:
                shard = write_shard(run, spec, updater.copy(plan, place, save_at, owned))
            if scalars[-1].stop:
                break
        return Ended(tuple(results), tuple(scalars), copied(updater, steps), shard)

    ended = run_ranks(plan, sync, rank)
    if save_at:
        shards = [end.shard for _, end in sorted(ended.items()) if end.shard]
        publish(run, spec, plan, Progress(save_at, save_at, save_at * BATCH, ""), shards)
    return ended


@pytest.fixture(scope="module")
def whole_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Place, Ended]]:
    """Returns the folder of a run that saved after step 3 and went on, and its devices' ends."""
    run = tmp_path_factory.mktemp("run")
    return run, train(corpus, HURT, run, save_at=SAVED)


def losses(ended: dict[Place, Ended]) -> list[float]:
    """The losses, which all devices must have alike."""
    every = [[result.loss for result in end.results] for end in ended.values()]
    assert all(other == every[0] for other in every)
    return every[0]


def resume(corpus: Corpus, layout: Layout, run: Path, optimizer: OptimizerMode = "replicated") -> dict[Place, Ended]:
    return train(corpus, layout, run, start=newest_checkpoint(run, lambda text: pytest.fail(text)), optimizer=optimizer)


def check_to_the_bit(resumed: dict[Place, Ended], expected: dict[Place, Ended]) -> None:
    """A run that went on from `SAVED` has the losses and ends with the state of the one that was never stopped."""
    assert losses(resumed) == losses(expected)[SAVED:]
    for place, end in resumed.items():
        state = expected[place].state
        assert end.state.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in end.state.items())


def test_same_layout_resumes_to_the_bit(corpus: Corpus, whole_run: tuple[Path, dict[Place, Ended]]) -> None:
    """Catches anything that a checkpoint forgets: a moment, the step of the bias correction or of the schedule."""
    run, expected = whole_run
    check_to_the_bit(resume(corpus, HURT, run), expected)


@pytest.mark.parametrize("layout", OTHERS)
def test_other_layouts_resume_the_same_run(
    layout: str, corpus: Corpus, whole_run: tuple[Path, dict[Place, Ended]]
) -> None:
    """Catches state that goes to the wrong place under another layout: the losses would leave the run's at once."""
    run, expected = whole_run
    found = losses(resume(corpus, OTHERS[layout], run))
    assert found == pytest.approx(losses(expected)[SAVED:], rel=1e-12, abs=0)


@pytest.fixture(scope="module")
def sharded_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Place, Ended]]:
    """Returns what `whole_run` does, with zero1."""
    run = tmp_path_factory.mktemp("sharded")
    return run, train(corpus, HURT, run, save_at=SAVED, optimizer="zero1")


def norms(ended: dict[Place, Ended]) -> list[float]:
    """The norms of gradients, which all devices must have alike."""
    every = [[result.grad_norm for result in end.results] for end in ended.values()]
    assert all(other == every[0] for other in every)
    return every[0]


@pytest.mark.parametrize("layout", [HURT, (3, 3, ((0, 1), (2, 0), (2, 2)))], ids=["two replicas", "3, 2 and 1"])
def test_sharded_state_trains_the_same(layout: Layout, corpus: Corpus, tmp_path: Path) -> None:
    """Catches a clip norm that misses or repeats a piece, and losses that leave those of replicated state.

    Every step is clipped. 1e-11 is what rounding makes of float64.
    """
    whole, sharded = (train(corpus, layout, tmp_path, optimizer=mode) for mode in ("replicated", "zero1"))
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-11, abs=0)
    assert norms(sharded) == pytest.approx(norms(whole), rel=1e-11, abs=0)
    assert min(norms(whole)) > 0.5
    for place, end in sharded.items():
        weights = [name for name in end.state if name.startswith("weight ")]
        assert weights
        assert all(torch.allclose(end.state[name], whole[place].state[name], rtol=0, atol=1e-11) for name in weights)


def test_sharded_state_resumes_to_the_bit(corpus: Corpus, sharded_run: tuple[Path, dict[Place, Ended]]) -> None:
    """Catches a moment that its owner does not write, that a mirror does not read, or a step count that is lost."""
    run, expected = sharded_run
    check_to_the_bit(resume(corpus, HURT, run, "zero1"), expected)


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize(("written", "read"), [("zero1", "replicated"), ("replicated", "zero1"), ("zero1", "zero1")])
def test_checkpoints_do_not_know_who_kept_what(
    written: str,
    read: OptimizerMode,
    layout: str,
    corpus: Corpus,
    whole_run: tuple[Path, dict[Place, Ended]],
    sharded_run: tuple[Path, dict[Place, Ended]],
) -> None:
    """Catches state that goes to the wrong place between the two kinds or two layouts."""
    run, expected = whole_run if written == "replicated" else sharded_run
    found = losses(resume(corpus, OTHERS[layout], run, read))
    assert found == pytest.approx(losses(expected)[SAVED:], rel=1e-11, abs=0)


def test_a_wrong_start_is_seen(corpus: Corpus, whole_run: tuple[Path, dict[Place, Ended]], tmp_path: Path) -> None:
    """Catches tests above that pass whatever is loaded: a run that starts afresh must differ."""
    _, expected = whole_run
    fresh = losses(train(corpus, HURT, tmp_path, steps=SAVED))
    assert fresh == losses(expected)[:SAVED]
    assert fresh != pytest.approx(losses(expected)[SAVED:], rel=1e-6)


def test_accumulation_changes_nothing(
    corpus: Corpus, whole_run: tuple[Path, dict[Place, Ended]], tmp_path: Path
) -> None:
    """Catches a mean over micro-batches, or gradients exchanged before the last of them."""
    _, expected = whole_run
    for micro_batch in (1, BATCH):
        found = losses(train(corpus, HURT, tmp_path, micro_batch=micro_batch))
        assert found == pytest.approx(losses(expected), rel=1e-11, abs=0)


def test_all_stop_after_the_step_in_which_one_was_asked(corpus: Corpus, tmp_path: Path) -> None:
    """Catches devices that stop at different steps, which would leave the others waiting."""
    ended = train(corpus, HURT, tmp_path, before=lambda place, step, _: place == (1, 1) and step >= 2)
    assert [len(end.results) for end in ended.values()] == [3, 3, 3]
    assert all([scalars.stop for scalars in end.scalars] == [0.0, 0.0, 1.0] for end in ended.values())


def test_all_skip_a_step_with_a_gradient_that_is_not_finite(corpus: Corpus, tmp_path: Path) -> None:
    """Catches one device that applies a step which another one skips, and a skipped step that changes anything."""

    def poison(place: Place, step: int, trainer: Trainer) -> bool:
        name = "model.layers.0.mlp.down_proj.weight"
        if place == (0, 1) and step == 1:
            handle = trainer.params[name].register_hook(lambda grad: grad * math.inf)
            handles.append(handle.remove)
        elif place == (0, 1) and step == 2:
            handles.pop()()
        return False

    handles: list[Callable[[], None]] = []
    ended = train(corpus, HURT, tmp_path / "poisoned", steps=2, before=poison)
    for end in ended.values():
        assert [result.skipped for result in end.results] == [False, True]
        assert math.isnan(end.results[1].grad_norm)
        assert math.isfinite(end.results[1].loss)
    once = train(corpus, HURT, tmp_path / "once", steps=1)
    for place, end in ended.items():
        assert all(torch.equal(value, once[place].state[name]) for name, value in end.state.items())
    handles.clear()
    after = train(corpus, HURT, tmp_path / "after", steps=3, before=poison)
    assert handles == []
    assert all(not end.results[2].skipped and math.isfinite(end.results[2].grad_norm) for end in after.values())


def test_nobody_goes_over_to_another_plan_before_all_have_the_order() -> None:
    """Catches a device that leaves the plan because a peer's order came before its own: it does not know where to."""
    sums = Scalars(num_devices=4, loss_sum=1, num_targets=1, squared_norm=1, non_finite=0, stop=0, switch=3)
    assert not sums.all_switch
    assert replace(sums, switch=4.0).all_switch
