"""Hosts of addresses."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, by its name or number. Only `localhost` is a name that is known to be so."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
