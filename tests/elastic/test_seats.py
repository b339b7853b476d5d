"""Which rank drives which device, and what a replica must not span."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runflat.elastic.seats import Seats, read_domains
from runflat.errors import ConfigError

DEVICES = ("0:0", "0:1", "1:0", "1:1", "s0")


def test_ranks_fill_replica_after_replica_then_spares() -> None:
    """Catches neighbours in rank, so on one node, that are spread over replicas."""
    seats = Seats(DEVICES)
    assert [seats.device(rank) for rank in range(6)] == [*DEVICES, None]


def test_no_replica_spans_nodes_unless_told_to() -> None:
    """Catches tensor parallelism over the slow network by a launcher that gives ranks in another order."""
    present = {"0:0": "n0", "1:0": "n1"}
    assert Seats(DEVICES).problem("0:1", "n0", present) is None
    text = Seats(DEVICES).problem("0:1", "n1", present)
    assert text is not None
    assert "span the domains n0 and n1" in text
    assert Seats(DEVICES, may_span=True).problem("0:1", "n1", present) is None
    assert Seats(DEVICES, {"n0": "rack", "n1": "rack"}).problem("0:1", "n1", present) is None
    assert Seats(DEVICES).problem("s0", "n7", present) is None
    assert Seats(DEVICES).problem("0:0", "n7", {"0:0": "n0"}) is None, "the one that it replaces does not count"


def test_domains_come_from_a_file(tmp_path: Path) -> None:
    """Catches a topology that is read wrong, or a mistake in it that becomes a traceback."""
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"rack1": ["n0", "n1"], "rack2": ["n2"]}))
    assert read_domains(path) == {"n0": "rack1", "n1": "rack1", "n2": "rack2"}
    path.write_text(json.dumps({"rack1": ["n0"], "rack2": ["n0"]}))
    with pytest.raises(ConfigError, match="n0 in rack1 and in rack2"):
        read_domains(path)
    for text in ("[]", '{"rack1": "n0"}', "{", "[" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="topology"):
            read_domains(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_domains(tmp_path / "none")


def test_a_rank_without_a_device_is_one_too_many() -> None:
    """Catches a rank left over on a node that is waited for, or takes the device of the next one."""
    seats = Seats(("0:0", None, "1:0"))
    assert seats.devices == ("0:0", "1:0")
    assert [seats.device(rank) for rank in range(4)] == ["0:0", None, "1:0", None]
