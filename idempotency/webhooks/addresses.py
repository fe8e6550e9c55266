"""Where webhooks may be sent: public addresses, over https. Checked when an endpoint is registered and at each connection.

A customer chooses the URL, and this machine makes the request: without these rules it would reach what only this network can.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from ..errors import AddressRefused
from ..extras import extra
from ..hosts import Address, Allowed

with extra("webhooks"):
    import idna

# The addresses of a host's name. Raises `OSError`.
Resolve = Callable[[str, int], Sequence[Address]]

# Characters; more is refused by many servers.
URL_LIMIT = 2048
HTTPS_PORT = 443
# Below are the ports of a system's own services (RFC 6335).
FIRST_USER_PORT = 1024
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
# Old parsers take a host for an IPv4 address if its last part is a number: 0x7f.1, 2130706433, 0177.0.0.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)

# What `is_global` does not know in every version of Python.
_NOT_PUBLIC = tuple(
    ip_network(each)
    for each in (
        "192.0.0.0/24",  # protocol assignments; metadata of one cloud
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # the host of a virtual machine, in Azure
        "2001::/23",  # protocol assignments, Teredo
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",  # documentation
    )
)
# The 32 bits before an IPv4 address that ISATAP takes out of an IPv6 one (RFC 5214).
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
# Everything else of IPv6 is local, reserved, or has an IPv4 address inside (::ffff:0:0/96, 64:ff9b::/96).
_GLOBAL_UNICAST = IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that keeps the rules. `host` is a name in ASCII or an address; `path` has the query."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The host as a request names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"https://{self.authority}{self.path}"

    @property
    def address(self) -> Address | None:
        """The address, if the URL has one instead of a name."""
        return _address(self.host)


def target_of(url: str, allowed: Allowed) -> Target:
    """Read the URL of an endpoint. Raises `AddressRefused`, which names the rule and not the URL."""
    if len(url) > URL_LIMIT:
        raise AddressRefused(f"url: at most {URL_LIMIT} characters, got {len(url)}")
    if not url.isprintable() or " " in url or "\\" in url:
        raise AddressRefused("url: no spaces, backslashes or control characters")
    try:
        parts = urlsplit(url)
        port, name = parts.port, parts.hostname
    except ValueError:
        raise AddressRefused("url: not a URL") from None
    if parts.scheme != "https" or not name:
        raise AddressRefused("url: must begin with https:// and a host")
    if "@" in parts.netloc:
        raise AddressRefused("url: no user and no password")
    if parts.fragment or not (parts.path + parts.query).isascii():
        raise AddressRefused("url: no fragment; path and query in ASCII, other characters percent-encoded")
    port = HTTPS_PORT if port is None else port
    if port != HTTPS_PORT and port < FIRST_USER_PORT:
        raise AddressRefused(f"url: port {HTTPS_PORT}, or one from {FIRST_USER_PORT} on, got {port}")
    host = _bracketed(name) if parts.netloc.startswith("[") else _host(name, allowed)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = Target(host, port, path)
    if target.address is not None:
        _check((target.address,), host, allowed)
    return target


def addresses_of(target: Target, allowed: Allowed, resolve: Resolve) -> Sequence[Address]:
    """The addresses to connect to: found once, every one of them checked. Raises `AddressRefused` and `OSError`."""
    found = (target.address,) if target.address is not None else tuple(resolve(target.host, target.port))
    _check(found, target.host, allowed)
    return found


def look_up(host: str, port: int) -> list[Address]:
    """Ask the system's resolver. Raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))


def is_public(address: Address) -> bool:
    """Whether this address means the same machine everywhere on the internet."""
    if isinstance(address, IPv6Address):
        if address not in _GLOBAL_UNICAST or address.scope_id is not None:
            return False
        if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
            return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def _check(found: Sequence[Address], host: str, allowed: Allowed) -> None:
    # a name with one public and one private address would be a matter of luck
    if host not in allowed.hosts and not all(is_public(each) or allowed.has(each) for each in found):
        raise AddressRefused("url: its host must have public addresses only, or be in webhook_allowed_hosts")


def _bracketed(name: str) -> str:
    try:
        address = IPv6Address(name)
    except ValueError:
        raise AddressRefused("url: not an IPv6 address between the brackets") from None
    if address.scope_id is not None:
        raise AddressRefused("url: no zone in an IPv6 address")
    return str(address)


def _host(name: str, allowed: Allowed) -> str:
    """A name as DNS has it, or an IPv4 address."""
    try:
        host = idna.encode(name.rstrip("."), uts46=True).decode() if not name.isascii() else name.lower().rstrip(".")
    except (idna.IDNAError, UnicodeError):
        raise AddressRefused("url: not the name of a host") from None
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        address = _address(host)
        if not isinstance(address, IPv4Address):
            raise AddressRefused("url: an IPv4 address is four decimal numbers without leading zeros")
        return host
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressRefused("url: not the name of a host")
    if len(labels) < 2 and host not in allowed.hosts:
        raise AddressRefused("url: the host's name must have a dot, or be in webhook_allowed_hosts")
    return host


def _address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
