"""Where to listen and whom to call: addresses, host names, network interfaces and ports, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runflat.errors import ConfigError

MAX_PORT = 65_535
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
_MAX_INTERFACE_NAME = 15
_GLOBAL_SCOPE = "00"
_HOST_SCOPE = "10"
"""Scopes of a row of /proc/net/if_inet6; others need the interface beside the address."""


@dataclass(frozen=True)
class Endpoint:
    """Host (an address or a name) and TCP port; printed as HOST:PORT, an IPv6 address in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, flag: str, port: int | None = None) -> Endpoint:
    """The endpoint that `text` names: HOST:PORT, [IPV6]:PORT, or, where `port` is given, a host alone.

    Raises:
        ConfigError: it names none; says which `flag` has the value.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        found = rest.removeprefix(":") if bracket and (not rest or rest.startswith(":")) else "no port"
    elif text.count(":") > 1:
        host, found = text, ""  # an IPv6 address without a port
    else:
        host, _, found = text.partition(":")
    if not found and port is not None:
        found = str(port)
    if not host or not (found.isascii() and found.isdigit() and int(found) <= MAX_PORT):
        raise ConfigError(
            f"{flag} is {text!r}; it is written HOST:PORT, such as node7:29500 or [fd00::7]:29500, with a port up to "
            f"{MAX_PORT}."
        )
    return Endpoint(host, int(found))


def local_address(name: str, flag: str) -> str:
    """The address of this machine that `name` stands for: an interface such as eth0, an address, or a host name.

    Raises:
        ConfigError: it stands for none; says which `flag` has the value.
    """
    if name in {interface for _, interface in socket.if_nameindex()}:
        addresses = _addresses_of(name)
        if not addresses:
            raise ConfigError(f"{flag} is {name}, but this interface has no address; name another one, or an address.")
        return addresses[0]
    return resolved(name, flag)


def resolved(name: str, flag: str) -> str:
    """The first address of a host name; an address is its own.

    Raises:
        ConfigError: the name is not known; says which `flag` has the value.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        known = ", ".join(interface for _, interface in socket.if_nameindex())
        raise ConfigError(
            f"{flag} is {name!r}, which is no address, no host name that is known here ({error}) and none of this "
            f"machine's interfaces ({known})."
        ) from error
    return str(found[0][4][0])


def interface_of(address: str) -> str | None:
    """The interface of this machine that has `address`; None where none has."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address in _addresses_of(name)), None)


def _addresses_of(interface: str) -> list[str]:
    """An IPv4 and an IPv6 address of an interface, as far as it has them."""
    found: list[str | None] = []
    asked = struct.pack("256s", interface.encode()[:_MAX_INTERFACE_NAME])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain, contextlib.suppress(OSError):  # it has no IPv4
        found.append(socket.inet_ntoa(fcntl.ioctl(plain.fileno(), _SIOCGIFADDR, asked)[20:24]))
    with contextlib.suppress(OSError):  # no IPv6 in this kernel
        found.append(ipv6_address_of(interface, Path("/proc/net/if_inet6").read_text().splitlines()))
    return [address for address in found if address is not None]


def ipv6_address_of(interface: str, rows: Iterable[str]) -> str | None:
    """The first address of `interface` in rows of /proc/net/if_inet6 that needs no interface beside it."""
    for row in rows:
        digits, _, _, scope, _, name = row.split()
        if name == interface and scope in (_GLOBAL_SCOPE, _HOST_SCOPE):
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


BACKLOG = 128
"""Calls that may wait to be accepted."""


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address of this machine; port 0 takes a free one.

    Raises:
        OSError: the address is not ours, or the port is taken.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
