"""The agent's rules: who may do what, what ends a lease, what is restored, and what is left alone."""

from collections.abc import Callable

import pytest

from runflat.power.fakes import JOB, MAX_W, NOMINAL_W, STRANGER, FakeNode, site_limits
from runflat.power.journal import JournalError, MemoryJournal, Owed
from runflat.power.keeper import SETTLE_S, Keeper
from runflat.power.wire import Acquire, Failure, Granted, Read, Renew, Reply, SetDone

HEALTHY = [NOMINAL_W] * 3


def code(reply: Reply) -> str:
    """The error of a reply, or its type if it is none."""
    return reply.error if isinstance(reply, Failure) else reply.type


def test_boost_and_release(node: FakeNode) -> None:
    """Catches a limit that is not set, a lease that blocks its own holder, a release that restores max or default."""
    lease = node.lease("GPU-a", "GPU-b")
    assert isinstance(node.set(lease, a=1010.0, b=1000.0), SetDone)
    assert node.limits() == [1010.0, 1000.0, NOMINAL_W]
    assert (node.state("GPU-a").state, node.state("GPU-a").confirmed) == ("leased", True)
    assert code(node.release(lease)) == "released"
    assert node.limits() == HEALTHY
    assert (node.state("GPU-a").state, node.saved.load()) == ("free", {})


def test_silence_ends_at_nominal(node: FakeNode) -> None:
    """Catches a lease that outlives its controller, or that ends although it is renewed."""
    lease = node.lease(ttl_s=10.0)
    node.set(lease, a=1100.0)
    for _ in range(3):
        node.wait(9)
        assert code(node.agent.handle(JOB, Renew(lease=lease), node.now_s)) == "granted"
    assert node.limits()[0] == 1100.0
    node.wait(10)
    assert node.limits() == HEALTHY
    assert code(node.set(lease, a=1100.0)) == "no-lease"
    assert ("lease-ended", "expired") in [(event, facts.get("why")) for event, facts in node.log]


def test_expired_lease_is_over_before_it_is_used(node: FakeNode) -> None:
    """Catches a message that comes late, yet before the agent's own look at the clock, and brings a lease back."""
    lease = node.lease(ttl_s=10.0)
    node.set(lease, a=1100.0)
    node.now_s += 10.0
    assert code(node.agent.handle(JOB, Renew(lease=lease), node.now_s)) == "no-lease"
    assert node.limits() == HEALTHY


def test_stop_and_start_restore(node: FakeNode) -> None:
    """Catches an agent that leaves devices boosted: on an order to stop, or after a crash and a new start."""
    node.set(node.lease(), a=1100.0)
    assert node.agent.stop(node.now_s) == ()
    assert node.limits() == HEALTHY
    node.start()
    node.set(node.lease(), b=1100.0, c=800.0)
    node.start()
    assert node.limits() == HEALTHY
    assert node.saved.load() == {}


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda node, lease: node.acquire("GPU-c", caller=STRANGER), "not-allowed"),
        (lambda node, lease: node.agent.handle(STRANGER, Read(), node.now_s), "not-allowed"),
        (lambda node, lease: node.acquire("GPU-x"), "unavailable"),
        (lambda node, lease: node.acquire("GPU-a"), "unavailable"),
        (lambda node, lease: node.acquire("GPU-c", ttl_s=31.0), "range"),
        (lambda node, lease: node.set(lease, a=1150.1), "range"),
        (lambda node, lease: node.set(lease, a=799.9), "range"),
        (lambda node, lease: node.set(lease, a=1000.0, b=1201.0), "range"),
        (lambda node, lease: node.set(lease, c=1000.0), "not-leased"),
        (lambda node, lease: node.set(lease, x=1000.0), "not-leased"),
        (lambda node, lease: node.set("lease-9", a=1000.0), "no-lease"),
        (lambda node, lease: node.agent.handle(STRANGER, Renew(lease=lease), node.now_s), "not-allowed"),
    ],
)
def test_refused(node: FakeNode, act: Callable[[FakeNode, str], Reply], error: str) -> None:
    """Catches a rule that lets something through, does half of it, or forgets to write it down."""
    lease = node.lease("GPU-a", "GPU-b")
    assert code(act(node, lease)) == error
    assert node.limits() == HEALTHY
    assert node.written == []
    assert node.events()[-1] == "refused"


def test_lease_of_another_user() -> None:
    """Catches a lease that anybody on the list can renew or use."""
    node = FakeNode(site=site_limits(allow_uids=(JOB.uid, STRANGER.uid)))
    lease = node.lease("GPU-a")
    assert code(node.agent.handle(STRANGER, Renew(lease=lease), node.now_s)) == "no-lease"
    assert code(node.acquire("GPU-b", caller=STRANGER)) == "granted"


def test_budget() -> None:
    """Catches limits that fit one by one and not together, and savings of one job that another spends."""
    node = FakeNode(site=site_limits(budget_w=3 * NOMINAL_W + 100))
    lease = node.lease()
    assert code(node.set(lease, a=1060.0)) == "set-done"
    assert code(node.set(lease, b=961.5)) == "budget"
    assert code(node.set(lease, b=800.0)) == "set-done"
    assert code(node.set(lease, c=1060.0)) == "budget"
    assert code(node.set(lease, a=NOMINAL_W, c=1060.0)) == "set-done"
    assert node.written[-2:] == [("GPU-a", NOMINAL_W), ("GPU-c", 1060.0)]


def test_raise_waits_for_the_lowering_that_pays_for_it() -> None:
    """Catches a raise on watts that another device was to give up and did not."""
    node = FakeNode(site=site_limits(budget_w=3 * NOMINAL_W + 100))
    lease = node.lease()
    node.set(lease, a=1060.0)
    node.devices.devices["GPU-a"].set_failure = "driver"
    reply = node.set(lease, a=NOMINAL_W, c=1060.0)
    assert isinstance(reply, Failure)
    assert set(reply.devices) == {"GPU-a", "GPU-c"}
    assert node.limits() == [1060.0, NOMINAL_W, NOMINAL_W]


@pytest.mark.parametrize("limit_w", [NOMINAL_W, 500.0, 1050.0, MAX_W])
def test_foreign_writer_is_left_alone(node: FakeNode, limit_w: float) -> None:
    """Catches an agent that fights: another writer's value is overwritten, now, at the end, or by the next lease."""
    lease = node.lease()
    node.set(lease, a=1100.0, b=1000.0)
    node.devices.devices["GPU-a"].limit_w = limit_w
    node.wait(2)
    assert node.state("GPU-a").state == "given-up"
    assert code(node.set(lease, a=1000.0)) == "not-leased"
    node.release(lease)
    node.devices.devices["GPU-a"].limit_w = NOMINAL_W
    assert code(node.acquire("GPU-a")) == "unavailable"
    assert node.written.count(("GPU-a", NOMINAL_W)) == 0
    assert node.limits()[1] == NOMINAL_W
    assert "foreign-writer" in node.events()


def test_foreign_writer_just_before_a_write_and_while_the_agent_is_down(node: FakeNode) -> None:
    """Catches a write that does not look first, and a restart that restores over somebody else's limit."""
    lease = node.lease()
    node.set(lease, a=1100.0)
    node.devices.devices["GPU-a"].limit_w = 700.0
    assert code(node.set(lease, a=1140.0)) == "device"
    node.set(lease, b=1100.0)
    node.devices.devices["GPU-b"].limit_w = 700.0
    node.start()
    assert node.limits() == [700.0, 700.0, NOMINAL_W]
    assert node.state("GPU-b").state == "given-up"


def test_reloaded_driver_is_no_writer(node: FakeNode) -> None:
    """Catches devices that stay at the default, above nominal, because a driver reload looks like another writer."""
    lease = node.lease()
    node.set(lease, a=1100.0)
    node.wait(5)
    for device in node.devices.devices.values():
        device.reload_driver()
    node.wait(1)
    assert node.limits() == HEALTHY
    assert node.state("GPU-a").state == "free"
    assert "driver-reset" in node.events()
    assert code(node.set(lease, a=1100.0)) == "not-leased"
    assert code(node.acquire("GPU-a")) == "granted"


def test_reload_while_the_agent_is_down(node: FakeNode) -> None:
    """Catches a reboot after a crash that leaves the default in force."""
    node.wait(5)
    node.set(node.lease(), a=1100.0)
    node.devices.devices["GPU-a"].reload_driver()
    node.start()
    assert node.limits() == HEALTHY


def test_cap_from_outside(node: FakeNode) -> None:
    """Catches a raise that is asked for and not enforced: it would spring into force when the cap goes."""
    lease = node.lease()
    node.devices.devices["GPU-a"].cap_w = 1000.0
    assert code(node.set(lease, a=1100.0)) == "set-done"
    assert not node.state("GPU-a").confirmed
    node.wait(round(SETTLE_S) + 1)
    assert node.limits() == HEALTHY
    assert "1000 W is enforced" in (node.state("GPU-a").trouble or "")
    assert code(node.set(lease, a=1000.0)) == "set-done"
    node.release(lease)
    node.devices.devices["GPU-a"].cap_w = 900.0
    assert code(node.acquire("GPU-a")) == "unavailable"


def test_deaf_device(node: FakeNode) -> None:
    """Catches a setter that reports success and does nothing: only the read-back counts."""
    lease = node.lease()
    node.devices.devices["GPU-a"].deaf = True
    assert code(node.set(lease, a=1100.0)) == "device"
    assert node.limits() == HEALTHY


def test_device_that_cannot_be_restored_now(node: FakeNode) -> None:
    """Catches a debt that is forgotten: a device that is lost at the end of its lease is restored when it is back."""
    lease = node.lease()
    node.set(lease, a=1100.0)
    node.devices.devices["GPU-a"].failure = "lost"
    reply = node.release(lease)
    assert code(reply) == "released"
    node.start()
    node.wait(3)
    assert node.state("GPU-a").state == "restoring"
    assert code(node.acquire("GPU-a")) == "unavailable"
    node.devices.devices["GPU-a"].failure = None
    node.wait(1)
    assert node.limits() == HEALTHY
    assert node.events().count("device-error") <= 3


def test_journal_that_cannot_be_written(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a raise without a record of the way back, and a restore that waits for a disk that is full."""

    def full(owed: object) -> None:
        raise OSError(28, "No space left on device")

    lease = node.lease()
    node.set(lease, a=1100.0)
    monkeypatch.setattr(node.saved, "save", full)
    assert code(node.set(lease, b=1100.0)) == "device"
    assert node.limits() == [1100.0, NOMINAL_W, NOMINAL_W]
    node.release(lease)
    assert node.limits() == HEALTHY
    monkeypatch.undo()
    node.wait(1)
    assert node.saved.load() == {}


def test_damaged_journal(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a journal that is lost with the debt in it: what may be ours goes to nominal, what cannot be stays."""
    node.set(node.lease(), a=1100.0, b=800.0)
    node.devices.devices["GPU-c"].limit_w = MAX_W

    def damaged() -> dict[str, Owed]:
        raise JournalError("not JSON")

    monkeypatch.setattr(node, "load", damaged)
    node.start()
    assert node.limits() == [NOMINAL_W, NOMINAL_W, MAX_W]
    assert isinstance(node.saved, MemoryJournal)
    assert node.saved.load() == {}


def test_damaged_journal_outlives_a_restore_without_devices(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a clean-up after a crash that wipes the damage away, so that the next agent believes nothing is owed."""

    def damaged() -> dict[str, Owed]:
        raise JournalError("not JSON")

    node.set(node.lease(), a=1100.0)
    before = node.saved.load()
    monkeypatch.setattr(node, "load", damaged)
    assert Keeper({}, node, node, node.write_down, node.now_s).is_damaged
    assert node.saved.load() == before
    assert node.limits()[0] == 1100.0
    node.start()
    assert node.limits() == HEALTHY


def test_device_left_the_limits_file(node: FakeNode) -> None:
    """Catches a boosted device that nobody restores since the file no longer names it; it must not be leased again."""
    node.set(node.lease(), a=1100.0)
    node.site = site_limits(devices={"GPU-b": {"nominal_w": NOMINAL_W, "ceiling_w": 1000.0}})
    node.start()
    assert node.limits() == HEALTHY
    assert code(node.acquire("GPU-a")) == "unavailable"
    reply = node.agent.handle(JOB, Read(), node.now_s)
    assert reply.type == "telemetry"
    assert [state.uuid for state in reply.devices] == ["GPU-b"]


def test_not_at_nominal(node: FakeNode) -> None:
    """Catches a boost from a limit that is not the site's: its nominal would be restored over somebody's choice."""
    node.devices.devices["GPU-a"].limit_w = MAX_W
    reply = node.acquire("GPU-a", "GPU-b")
    assert isinstance(reply, Failure)
    assert set(reply.devices) == {"GPU-a"}
    assert node.agent.handle(JOB, Acquire(devices=("GPU-b",), ttl_s=5.0), node.now_s).type == "granted"
    assert isinstance(node.acquire("GPU-c"), Granted)
