"""What a job's site on Ray does about lost actors, lost nodes and a cluster that is too small."""

from __future__ import annotations

from collections.abc import Sequence

from runflat.elastic.ray_facts import (
    Action,
    Ask,
    Begin,
    ControllerEnded,
    ControllerGone,
    Displaced,
    Drop,
    End,
    EndSeat,
    Failed,
    Gone,
    Happening,
    Interrupt,
    Over,
    Placed,
    Rules,
    Say,
    SeatStage,
    StartController,
    StartSeat,
    StopAsked,
    Tick,
    Up,
)
from runflat.elastic.ray_site import decide, open_site

PLACES = ("0:0", "0:1", "1:0", "1:1")
GROUPS = ("replica 0", "replica 1", "spares s0 to s1")


class Story:
    """A site of two replicas of two and two spares, to which things happen at given times."""

    def __init__(self, rules: Rules | None = None, spares: Sequence[str] = ("s0", "s1")):
        self.rules = rules or Rules()
        self.site = open_site(PLACES, spares, 2)

    def tell(self, now: float, *happenings: Happening) -> list[Action]:
        """Returns all that is done about it, without what is said."""
        done: list[Action] = []
        for happening in happenings:
            self.site, actions = decide(self.rules, self.site, happening, now)
            done += [action for action in actions if not isinstance(action, Say)]
        return done

    def start(self) -> None:
        """Has all groups placed and all actors run, at second 0."""
        self.tell(0.0, Begin(), *(Placed(group, ("n",)) for group in self.site.groups))
        self.tell(0.0, *(Up(rank, 1, "n") for rank in self.site.seats))


def test_groups_are_replicas_and_as_many_spares_as_one_has() -> None:
    """Catches spares that cannot replace a node, ranks that are not those of the controller, a device left out."""
    groups = open_site(PLACES, ("s0", "s1", "s2"), 2).groups
    assert {name: group.ranks for name, group in groups.items()} == {
        "replica 0": (0, 1),
        "replica 1": (2, 3),
        "spares s0 to s1": (4, 5),
        "spare s2": (6,),
    }
    assert list(open_site(("0:0",), ("s0",), 1).groups) == ["replica 0", "spare s0"]


def test_a_job_starts_when_all_groups_are_placed() -> None:
    """Catches a controller that starts before there is room, and an actor outside of the room that was asked for."""
    story = Story()
    assert story.tell(0.0, Begin()) == [Ask(group, 2) for group in GROUPS]
    assert story.tell(1.0, Placed("replica 0", ("a",)), Placed("replica 1", ("b",)), Tick()) == []
    controller, *actors = story.tell(2.0, Placed("spares s0 to s1", ("c",)))
    assert controller == StartController(resume=False, wait_s=story.rules.wait_s)
    assert actors == [
        StartSeat(rank, 1, device, GROUPS[rank // 2], rank % 2) for rank, device in enumerate((*PLACES, "s0", "s1"))
    ]
    assert story.tell(3.0, Tick()) == []


def test_a_job_starts_late_with_the_replicas_that_there_are() -> None:
    """Catches a job that waits for a spare for ever, and one that drops the request that an autoscaler answers."""
    story = Story(Rules(wait_s=60.0, pending_s=100.0))
    story.tell(0.0, Begin(), Placed("replica 1", ("b",)))
    assert story.tell(59.0, Tick()) == []
    controller, *actors = story.tell(60.0, Tick())
    assert controller == StartController(resume=False, wait_s=story.rules.late_wait_s)
    assert [action.device for action in actors if isinstance(action, StartSeat)] == ["1:0", "1:1"]
    assert story.tell(150.0, Tick((0, 0))) == [], "the requests stand"
    later = story.tell(500.0, Placed("replica 0", ("a",)))
    assert [action.device for action in later if isinstance(action, StartSeat)] == ["0:0", "0:1"]


def test_a_cluster_without_room_for_a_replica_ends_the_job() -> None:
    """Catches a job that waits for ever on a cluster where nothing can be placed, or that spares alone start."""
    story = Story(Rules(wait_s=60.0))
    story.tell(0.0, Begin(), Placed("spares s0 to s1", ("c",)))
    (end,) = story.tell(60.0, Tick())
    assert isinstance(end, End)
    assert (end.code, "within 60 s (--wait-s)" in end.text) == (1, True)


def test_a_lost_actor_starts_again_in_its_place_later_and_later() -> None:
    """Catches an actor that stays lost, one that is started at full speed, one that is started twice."""
    story = Story()
    story.start()
    now = 10.0
    for life, pause_s in enumerate((1.0, 2.0, 4.0), 1):
        assert story.tell(now, Gone(1, life, "died")) == []
        assert story.tell(now, Gone(1, life, "died"), Tick()) == [], "told twice"
        assert story.tell(now + pause_s - 0.1, Tick()) == []
        now += pause_s
        assert story.tell(now, Tick()) == [StartSeat(1, life + 1, "0:1", "replica 0", 1)]
        story.tell(now, Up(1, life + 1, "n"))
    now += story.rules.steady_s
    story.tell(now, Gone(1, 4, "died"))
    assert story.tell(now + 1.0, Tick()) == [StartSeat(1, 5, "0:1", "replica 0", 1)], "one that lived long"


def test_a_lost_node_keeps_its_request_and_comes_back_with_its_actors() -> None:
    """Catches actors that are asked for where there is no node, and a replica that is given up with its node."""
    story = Story()
    story.start()
    assert story.tell(10.0, Displaced("replica 1"), Gone(2, 1, "node"), Gone(3, 1, "node")) == []
    assert story.tell(400.0, Tick((0, 0)), Tick((0, 0))) == []
    back = story.tell(500.0, Placed("replica 1", ("d",)))
    assert back == [StartSeat(2, 2, "1:0", "replica 1", 0), StartSeat(3, 2, "1:1", "replica 1", 1)]


def test_a_replica_that_no_node_can_hold_is_asked_for_in_part() -> None:
    """Catches a replica that waits for ever because a node lacks one device, and one that leaves live ones."""
    story = Story(Rules(pending_s=30.0))
    story.start()
    story.tell(10.0, Displaced("replica 1"), Gone(2, 1, "node"), Gone(3, 1, "node"))
    assert story.tell(39.0, Tick((1, 0))) == []
    assert story.tell(40.0, Tick((1, 0))) == [Drop("replica 1"), Ask("replica 1", 1)]
    assert story.tell(41.0, Placed("replica 1", ("d",))) == [StartSeat(2, 2, "1:0", "replica 1", 0)]
    whole = Story(Rules(pending_s=30.0))
    whole.start()
    whole.tell(10.0, Displaced("replica 1"), Gone(2, 1, "its node, one of two"))
    assert whole.tell(40.0, Tick((1,))) == [], "1:1 still works elsewhere"


def test_an_actor_that_does_not_start_is_given_up() -> None:
    """Catches a start that is waited for without end, and one that is given up because its node is not there yet."""
    story = Story(Rules(start_s=30.0))
    story.tell(0.0, Begin(), *(Placed(group, ("n",)) for group in GROUPS))
    story.tell(1.0, *(Up(rank, 1, "n") for rank in (0, 1, 4, 5)), Displaced("replica 1"))
    assert story.tell(30.0, Tick()) == []
    story.tell(31.0, Placed("replica 1", ("n",)))
    assert story.tell(60.0, Tick()) == [EndSeat(2, 1), EndSeat(3, 1)]
    assert story.tell(61.0, Tick()) == [
        StartSeat(2, 2, "1:0", "replica 1", 0),
        StartSeat(3, 2, "1:1", "replica 1", 1),
    ]


def test_an_actor_that_fails_again_and_again_stays_out() -> None:
    """Catches a job that starts a broken actor for ever, and one without any worker that does not end."""
    story = Story(Rules(max_errors=2, max_back_off_s=1.0), spares=())
    story.start()
    for rank in range(4):
        assert story.tell(10.0, Failed(rank, 1, "no such file")) == []
    story.tell(20.0, Tick())
    for rank in range(3):
        assert story.tell(20.0, Failed(rank, 2, "no such file")) == []
        assert story.site.seats[rank].stage is SeatStage.OUT
    (end,) = story.tell(20.0, Failed(3, 2, "no such file"))
    assert isinstance(end, End)
    assert (end.code, "no such file" in end.text) == (1, True)


def test_a_controller_that_dies_is_started_again_if_it_got_anywhere() -> None:
    """Catches a job that ends with its controller, and one that starts a controller that cannot work without end."""
    story = Story()
    story.start()
    assert story.tell(10.0, ControllerGone("died", committed=7)) == []
    assert story.tell(29.0, Tick()) == []
    assert story.tell(30.0, Tick()) == [StartController(resume=True, wait_s=story.rules.wait_s)]
    (end,) = story.tell(40.0, ControllerGone("died", committed=7))
    assert isinstance(end, End)
    assert (end.code, "--resume" in end.text) == (1, True)


def test_ends() -> None:
    """Catches an interrupt without a last checkpoint, a second one that is not heard, a lost code."""
    story = Story()
    story.start()
    assert story.tell(5.0, StopAsked()) == [Interrupt()]
    assert story.tell(6.0, Over(0, 1)) == []
    assert story.tell(7.0, ControllerEnded(130, "stopped at step 7")) == [End(130, "stopped at step 7")]
    story.tell(8.0, Gone(0, 1, "it had left"))
    assert story.site.seats[0].stage is SeatStage.OVER
    assert story.tell(9.0, StopAsked()) == [End(130, "interrupted")]
