"""Which hosts an address names, which of them are this machine, and which a setting allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from string import ascii_letters, digits
from typing import Any, Self

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Allowed:
    """The exceptions from a rule about hosts: names, and networks."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[str]) -> Self:
        """Read a setting that `check_hosts` has checked: `hooks.internal`, `10.1.2.0/24`, `127.0.0.1`."""
        hosts, networks = set(), []
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                hosts.add(entry.lower())
        return cls(frozenset(hosts), tuple(networks))

    def has(self, address: Address) -> bool:
        """Whether an address is in one of the networks."""
        return any(address in network for network in self.networks)

    def has_host(self, host: str) -> bool:
        """Whether a host, by its name or its address, is among them."""
        try:
            return self.has(ip_address(host))
        except ValueError:
            return host.lower() in self.hosts


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, by its name or number. Only `localhost` is a name that is known to be so."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def one_name(host: str) -> str:
    """A host as all its spellings are: in small letters, a number in its shortest form, and `localhost` for the usual numbers."""
    if host.startswith("/"):
        return host.rstrip("/")  # a directory of sockets
    name = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    with suppress(ValueError):
        name = str(ip_address(name))
    return "localhost" if name in ("127.0.0.1", "::1") else name


def libpq_parameters(given: Mapping[str, Any]) -> dict[str, str]:
    """What libpq connects with: what it is given, and for the rest what the environment says.

    A service that is given goes before the environment, and libpq alone reads its file: then only what is given counts. What
    PGSERVICE names is in libpq's defaults.
    """
    from psycopg.pq import Conninfo  # not every process that reads a setting about hosts has a database

    said = {name: str(value) for name, value in given.items() if value is not None}
    if said.get("service"):
        return said
    return {each.keyword.decode(): each.val.decode() for each in Conninfo.get_defaults() if each.val} | said


def check_hosts(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Names, addresses and networks as a setting has them. Raises `ValueError` for anything else."""
    for each in entries:
        if "/" in each and "//" not in each and "@" not in each:
            ip_network(each)  # a ValueError says what is wrong, and shows it
        elif not each.isascii() or not set(each) <= {*ascii_letters, *digits, *"-_.:"}:
            raise ValueError("each must be the name of a host in ASCII, an address, or a network like 10.1.0.0/16")
    return entries
