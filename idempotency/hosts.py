"""Which hosts an address names, which of them are this machine, and which a setting allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from string import ascii_letters, digits
from typing import Self

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


def check_hosts(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Names, addresses and networks as a setting has them. Raises `ValueError` for anything else."""
    for each in entries:
        if "/" in each:
            ip_network(each)  # a ValueError says what is wrong
        elif not each.isascii() or not set(each) <= {*ascii_letters, *digits, *"-_.:"}:
            raise ValueError("each must be the name of a host in ASCII, an address, or a network like 10.1.0.0/16")
    return entries
