"""Addresses, names, interfaces and ports as people write them."""

from __future__ import annotations

import socket

import pytest

from runflat.elastic.endpoint import Endpoint, interface_of, ipv6_address_of, listen, local_address, parse_endpoint
from runflat.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node7:29500", Endpoint("node7", 29500)),
        ("10.0.0.1:0", Endpoint("10.0.0.1", 0)),
        ("[fd00::7]:29500", Endpoint("fd00::7", 29500)),
        ("node7", Endpoint("node7", 1234)),
        ("[fd00::7]", Endpoint("fd00::7", 1234)),
        ("fd00::7", Endpoint("fd00::7", 1234)),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint) -> None:
    """Catches a form of address that is not understood, IPv6 among them, and one printed as none can be read."""
    assert parse_endpoint(text, "--listen", 1234) == endpoint
    assert parse_endpoint(str(endpoint), "--listen") == endpoint


@pytest.mark.parametrize("text", ["", ":1", "node7", "node7:x", "node7:70000", "[fd00::7", "[fd00::7]x", "node7:-1"])
def test_what_is_no_endpoint(text: str) -> None:
    """Catches a typing error that becomes another address, or a traceback."""
    with pytest.raises(ConfigError, match="--controller is .*HOST:PORT"):
        parse_endpoint(text, "--controller")


def test_an_interface_stands_for_its_address() -> None:
    """Catches an interface that is taken for a host name."""
    assert local_address("lo", "--listen") == "127.0.0.1"
    assert local_address("::1", "--listen") == "::1"
    with pytest.raises(ConfigError, match=r"--host is 'no such host\.', which is no address.*lo"):
        local_address("no such host.", "--host")


def test_the_interface_of_an_address() -> None:
    """Catches NCCL on another network than the one that was chosen."""
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_an_interface_with_ipv6_only() -> None:
    """Catches a link-local address, at which nobody can be reached without naming an interface too."""
    rows = [
        "fe80000000000000000000fffe000001 04 40 20 80     eth0",
        "fd000000000000000000000000000002 04 40 00 02     eth0",
        "00000000000000000000000000000001 01 80 10 80       lo",
    ]
    assert ipv6_address_of("eth0", rows) == "fd00::2"
    assert ipv6_address_of("lo", rows) == "::1"
    assert ipv6_address_of("eth1", rows) is None


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_listening_is_at_one_address(host: str, family: int) -> None:
    """Catches a socket that listens on more than the address that was asked for."""
    with listen(host) as listening:
        assert listening.getsockname()[0] == host
        assert listening.family == family
