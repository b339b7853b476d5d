"""The policy on emulated devices: it hides what it can, says what it cannot, and is at nominal after any trouble."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runflat.power.curve import PowerCurve, curve_named
from runflat.power.fake_site import NOMINAL_W, TP, FakeSite

LINEAR = PowerCurve(((0.5, 0.5), (1.0, 1.0), (1.5, 1.5)), "linear")


def steps(site: FakeSite, num: int) -> list[float]:
    """Seconds of each of so many steps: the slowest replica's own time under the limits in force."""
    seconds = []
    for _ in range(num):
        seconds.append(max(site.own_s().values()))
        site.turn(step=True)
    return seconds


def started(**wishes: object) -> FakeSite:
    """A site that has run for two steps with everybody there."""
    site = FakeSite(**wishes)
    steps(site, 2)
    assert site.written == []
    return site


def test_power_hides_a_loss_within_fifteen_steps_and_takes_no_more_than_it_needs() -> None:
    """Catches a ramp that stops short, overshoots, jumps by more than 50 W, or moves anybody but the survivors."""
    site = started(curve=LINEAR, max_w=1400.0)
    site.devices["1:2"].standing = "dead"
    times = steps(site, 15)
    assert times[0] == pytest.approx(4 / 3)
    assert times[-1] == pytest.approx(1.0)
    assert site.limits(1) == pytest.approx([NOMINAL_W * 4 / 3] * 3)
    assert site.limits(0) == [NOMINAL_W] * 4
    limit_w = dict.fromkeys(site.devices, NOMINAL_W)
    for _, name, watts in site.written:
        assert watts - limit_w[name] <= 50 + 1e-6
        limit_w[name] = watts
    assert len({at for at, _, _ in site.written}) == 7  # 333 W in steps of 50 W


def test_a_raise_waits_until_the_last_one_was_read_back() -> None:
    """Catches a second raise on trust: a device that ignores writes must not be written up to the ceiling."""
    site = started(curve=LINEAR, max_w=1400.0)
    site.devices["1:2"].standing = "dead"
    site.devices["1:0"].deaf = 99
    steps(site, 12)
    assert max(watts for _, name, watts in site.written if name == "1:0") == NOMINAL_W + 50
    assert site.limits(1) == [NOMINAL_W] * 3
    assert any("1:0: 1050 W were asked for, but 1000 W are read back" in text for text in site.words)
    assert site.speeds == {1: 1.0}


def test_no_evidence_no_raise() -> None:
    """Catches power for a replica that does not lag, whatever the curve says."""
    site = started(load_gain=0.7)
    site.devices["1:2"].standing = "dead"
    steps(site, 10)
    assert site.written == []


def test_steps_that_take_longer_than_predicted_get_a_little_more() -> None:
    """Catches a limit that never learns: the step really takes 3 % longer than the curve says."""
    site = started(curve=LINEAR, max_w=1500.0, load_gain=1.03)
    site.devices["1:2"].standing = "dead"
    assert steps(site, 15)[-1] == pytest.approx(1.03)
    assert steps(site, 80)[-1] == pytest.approx(1.0, abs=0.011)
    assert max(site.limits(1)) <= 1000 * 4 / 3 * 1.05


def test_the_shortfall_is_said_and_the_range_is_kept() -> None:
    """Catches silence where the curve does not reach."""
    site = started(curve=curve_named("cube"))
    site.devices["1:2"].standing = "dead"
    assert steps(site, 15)[-1] == pytest.approx(4 / 3 / 1.3 ** (1 / 3))
    assert site.limits(1) == pytest.approx([1300.0] * 3)
    assert any("wants 1.333x speed" in text and "1.091x by curve cube" in text for text in site.words)


def test_a_dead_device_keeps_its_share_of_the_budget_until_it_is_off() -> None:
    """Catches survivors who spend the watts of a device that still draws them."""
    site = started(curve=LINEAR, max_w=1400.0, budget_w=4300.0)
    site.devices["1:2"].standing = "dead"
    steps(site, 20)
    assert sum(site.limits(1)) == pytest.approx(3300.0)
    site.devices["1:2"].standing = "off"
    steps(site, 20)
    assert site.limits(1) == pytest.approx([NOMINAL_W * 4 / 3] * 3)


def test_two_replicas_share_what_a_rack_has() -> None:
    """Catches two raises in one step that fit one by one, but not together."""
    site = started(curve=LINEAR, max_w=1400.0, rack_w=8400.0)
    site.devices["0:0"].standing = site.devices["1:2"].standing = "dead"
    steps(site, 20)
    raised_w = sum(limit - NOMINAL_W for replica in (0, 1) for limit in site.limits(replica))
    assert raised_w == pytest.approx(400.0)


def test_watts_are_free_only_once_their_return_was_read() -> None:
    """Catches watts that are given to one replica while another, which was told to, has not given them back."""
    site = started(curve=LINEAR, max_w=1400.0, rack_w=8200.0)
    site.devices["0:0"].standing = "dead"
    steps(site, 10)
    site.devices["1:2"].standing = "dead"
    site.devices["0:1"].margin_c = 1.0
    for name in site.live(0):
        site.devices[name].deaf = 1
    steps(site, 2)
    assert sum(site.limits(0)) > 3000.0
    assert site.limits(1) == [NOMINAL_W] * 3
    steps(site, 15)
    assert sum(site.limits(1)) == pytest.approx(3200.0)


def test_a_hot_device_gets_no_more_and_a_reading_counts_once() -> None:
    """Catches a raise without thermal margin, and an old reading that is taken for the answer to a write."""
    site = started(curve=LINEAR, max_w=1400.0)
    site.devices["1:2"].standing = "dead"
    steps(site, 3)
    for device in site.devices.values():
        device.silent = True
    for _ in range(5):
        site.turn(step=True, seconds=0.0)
    assert not any("read back" in text for text in site.words)
    for device in site.devices.values():
        device.silent = False
    site.devices["1:1"].margin_c = 4.0
    raised_w = site.limits(1)
    steps(site, 5)
    assert site.limits(1) == raised_w
    site.devices["1:1"].margin_c = 6.0
    assert steps(site, 10)[-1] == pytest.approx(1.0)


def test_a_dead_device_does_not_keep_its_raised_limit() -> None:
    """Catches watts that stay booked for a device that is lost while it is raised."""
    site = started(curve=LINEAR, max_w=2100.0)
    site.devices["1:2"].standing = "dead"
    steps(site, 10)
    site.devices["1:1"].standing = "dead"
    site.turn()
    assert {site.devices[name].limit_w for name in site.devices} == {NOMINAL_W}


def test_somebody_elses_watts_are_given_back_to_the_budget() -> None:
    """Catches a boost that goes on in a budget that another writer has overdrawn, or that counts on his saving."""
    site = started(curve=LINEAR, max_w=1400.0, rack_w=8600.0)
    site.devices["1:2"].standing = "dead"
    steps(site, 10)
    site.devices["0:1"].limit_w = 1100.0
    site.meddled.add("0:1")
    site.turn()
    assert site.limits(1) == [NOMINAL_W] * 3
    assert any("exceed its 8600 W" in text for text in site.words)
    site.devices["0:1"].limit_w = NOMINAL_W
    site.devices["1:2"].limit_w = 400.0  # it may go back to nominal at any time
    site.turn()
    site.turn(seconds=1000.0)
    steps(site, 30)
    assert sum(site.limits(1)) <= 8600.0 - 5 * NOMINAL_W + 1e-6


def test_all_are_at_nominal_before_the_returning_device_draws() -> None:
    """Catches limits that stay up when the loss is mended; and a second boost right after it."""
    site = started()
    site.devices["1:2"].standing = "dead"
    steps(site, 15)
    site.joining.add(1)
    site.turn()
    assert site.limits(1) == [NOMINAL_W] * 3
    site.joining.clear()
    site.devices["1:2"].standing = "works"
    steps(site, 2)
    site.devices["1:3"].standing = "dead"
    steps(site, 5)
    assert site.limits(1) == [NOMINAL_W] * 3
    assert site.speeds == {1: 1.0}
    site.turn(seconds=61)
    assert site.speeds == {}
    steps(site, 15)
    assert min(site.limits(1)) > 1200


@pytest.mark.parametrize(
    ("trouble", "word"),
    [
        ({"margin_c": 1.0}, "thermal limit"),
        ({"alarm": "hardware power brake"}, "hardware power brake"),
        ({"lost": True}, "lost"),
        ({"silent": True}, "no reading"),
        ({"limit_w": 700.0}, "somebody else"),
        ({"cap_w": 900.0}, "caps it"),
    ],
)
def test_trouble_on_one_device_takes_its_replica_to_nominal(trouble: dict[str, object], word: str) -> None:
    """Catches a boost that goes on over heat, a power brake, a lost or silent device, another writer, or a cap."""
    site = started()
    site.devices["1:2"].standing = "dead"
    steps(site, 15)
    for name, value in trouble.items():
        setattr(site.devices["1:1"], name, value)
    if "limit_w" in trouble:
        site.meddled.add("1:1")
    for _ in range(12):
        site.turn()
    assert [site.devices[n].limit_w for n in ("1:0", "1:3")] == [NOMINAL_W] * 2
    assert any(word in text for text in site.words)
    assert site.speeds == {1: 1.0}
    assert site.limits(0) == [NOMINAL_W] * 4
    assert len([text for text in site.words if word in text]) == 1  # not once a second


def test_trouble_that_comes_again_is_held_off_for_longer() -> None:
    """Catches flapping between boost and heat."""
    site = started()
    site.devices["1:2"].standing = "dead"
    pauses = []
    for _ in range(3):
        steps(site, 15)
        assert min(site.limits(1)) > 1200
        site.devices["1:1"].margin_c = 1.0
        site.turn()
        site.devices["1:1"].margin_c = 20.0
        began = site.now
        while site.limits(1) == [NOMINAL_W] * 3:
            site.turn(step=True)
        pauses.append(site.now - began)
    assert pauses[0] >= 60
    assert pauses[1] >= 120
    assert pauses[2] >= 240


def test_saving_slows_the_healthy_to_the_pace_of_the_slowest() -> None:
    """Catches power that is burnt for waiting, and a healthy replica that is slowed below the pace."""
    site = started(curve=LINEAR, max_w=NOMINAL_W, min_w=500.0, save=True)
    site.devices["1:2"].standing = "dead"
    assert max(steps(site, 20)) == pytest.approx(4 / 3)
    assert site.limits(0) == pytest.approx([750.0] * 4)
    assert site.limits(1) == [NOMINAL_W] * 3
    site.devices["1:2"].standing = "works"
    site.turn()
    assert site.limits(0) == [NOMINAL_W] * 4


MEDDLING = ("kill", "return", "heat", "alarm", "calm", "foreign", "deaf", "silent", "lost", "off", "cap")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("step", "step", "step", "tick", "late", "broken", *MEDDLING)),
        st.integers(0, 1),
        st.integers(0, TP - 1),
        st.floats(0, 1),
    ),
    max_size=60,
)


def meddle(site: FakeSite, what: str, replica: int, slot: int, part: float) -> None:
    """Something happens to a device."""
    device = site.devices[f"{replica}:{slot}"]
    if what == "kill" and len(site.live(replica)) > 1:
        device.standing = "dead"
    elif what == "off" and device.standing == "dead":
        device.standing = "off"
    elif what == "return" and device.standing != "works":
        site.joining.add(replica)
        site.turn()
        site.turn()
        site.joining.discard(replica)
        assert all(
            d.limit_w <= NOMINAL_W or d.lost or d.deaf or n in site.meddled
            for n, d in site.devices.items()
            if n.startswith(f"{replica}:") and d.standing == "works"
        )
        device.standing = "works"
        device.limit_w = min(device.limit_w, NOMINAL_W) if f"{replica}:{slot}" not in site.meddled else device.limit_w
    elif what == "heat":
        device.margin_c = 10 * part
    elif what == "alarm":
        device.alarm = "power brake"
    elif what == "calm":
        device.margin_c, device.alarm, device.silent, device.lost, device.cap_w = 20.0, "", False, False, 9e9
    elif what == "foreign":
        device.limit_w = 500 + part * 499
        site.meddled.add(f"{replica}:{slot}")
    elif what == "deaf":
        device.deaf = 1 + int(part * 3)
    elif what == "silent":
        device.silent = True
    elif what == "lost":
        device.lost = True
    elif what == "cap":
        device.cap_w = 600 + 600 * part


@settings(max_examples=150, deadline=None)
@given(
    EVENTS,
    st.sampled_from(["ntp", "cube", "linear"]),
    st.sampled_from([None, 4000.0, 4150.0, 4400.0]),
    st.sampled_from([None, 8000.0, 8250.0, 8700.0]),
)
def test_whatever_happens_the_budget_holds_and_all_ends_at_nominal(
    events: list[tuple[str, int, int, float]], name: str, budget_w: float | None, rack_w: float | None
) -> None:
    """Catches, in any order of failures and meddling: a sum above the budget, a limit out of range, a stuck boost."""
    curve = LINEAR if name == "linear" else curve_named(name)
    site = FakeSite(curve=curve, budget_w=budget_w, rack_w=rack_w)
    site.turn()
    for what, replica, slot, part in events:
        if what == "step":
            site.turn(step=True)
        elif what == "tick":
            site.turn(seconds=0.25)
        elif what == "late":
            site.turn(seconds=30)
        elif what == "broken":
            site.turn(step=True, fail_after=int(part * 3))
        else:
            meddle(site, what, replica, slot, part)
    for device in site.devices.values():
        device.deaf = 0
        device.lost = device.silent = False
        device.standing = "works"
    for _ in range(12):
        site.turn(seconds=2)
    stuck = {n: d.limit_w for n, d in site.devices.items() if d.limit_w > NOMINAL_W and n not in site.meddled}
    assert stuck == {}
