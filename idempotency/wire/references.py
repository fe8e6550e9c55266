"""A result that is kept elsewhere, as its record knows it: where, and what it has to be."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

from ..errors import ResultUnreadable

# No JSON begins so: code that does not know it fails, and takes it for no value.
BEGIN = "object:"
# A name is random, so nothing that is put replaces anything, and nothing of a key or a person is in it. The folder keeps
# directories short.
_NAME = "[0-9a-f]{2}/[0-9a-f]{32}"
NAME_LENGTH = 35
_NAMED = re.compile(_NAME)
_REFERENCE = re.compile(f"{BEGIN}({_NAME}):([0-9a-f]{{64}}):([0-9]{{1,12}})")


class Reference(NamedTuple):
    """`name`: where it is; `size` in bytes and `sha256` in hex: what has to be there."""

    name: str
    sha256: str
    size: int

    def __str__(self) -> str:
        return f"{BEGIN}{self.name}:{self.sha256}:{self.size}"


def is_name(name: str) -> bool:
    """Whether this is the name of a large result; what else is in their place is somebody else's."""
    return _NAMED.fullmatch(name) is not None


def new_reference(data: bytes) -> Reference:
    """A reference to this, under a name that has never been used."""
    name = secrets.token_hex(16)
    return Reference(f"{name[:2]}/{name}", hashlib.sha256(data).hexdigest(), len(data))


def is_reference(text: str) -> bool:
    """Whether a stored result is a reference."""
    return text.startswith(BEGIN)


def reference(text: str) -> Reference:
    """The reference that a stored result is. Raises `ResultUnreadable`."""
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ResultUnreadable("result: its reference was altered")
    return Reference(found[1], found[2], int(found[3]))


def checked(to: Reference, data: bytes) -> str:
    """The text that a reference is to. Raises `ResultUnreadable` if this is something else."""
    if len(data) != to.size or hashlib.sha256(data).hexdigest() != to.sha256:
        raise ResultUnreadable(f"result: {to.name} is not what was stored there: its length or SHA-256 is another")
    return data.decode()
