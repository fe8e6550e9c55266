"""Hosts of addresses."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from string import ascii_letters, digits


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


def is_among(host: str, entries: Collection[str]) -> bool:
    """Whether a host, by its name or number, is among these names, addresses and networks (`10.1.0.0/16`)."""
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower() in {entry.lower() for entry in entries}
    return any(address in network for network in map(_network, entries) if network is not None)


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(entry)
    except ValueError:
        return None  # a name
