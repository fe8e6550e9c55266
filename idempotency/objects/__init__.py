"""Where results are kept that are longer than `result_limit`: files of a directory, a bucket of S3, or a place of your own.

An object is put before the commit that refers to it, under a name that is never used again. What no record refers to, because
that commit did not come or the record has gone, is deleted by a sweep (`upkeep/objects.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import ResultUnreadable, Undecided
from ..observe.logs import log
from ..wire import references

# Names that `older` gives at a time, and that `delete` takes: as many as S3 lists and deletes by one request.
PAGE = 1000


class ResultNotKept(Undecided):
    """The place does not take a result; its operation waits, however long that lasts."""


@runtime_checkable
class ObjectStore(Protocol):
    """A place for large results.

    An error of `put` postpones the commit, and the attempt is made again. One of `get` reaches whoever asks for the result, but
    for `KeyError`, which becomes `ResultUnreadable`. The sweep tries again later whatever else fails.

    Methods may be called from several threads at once.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store an object; when this returns, it outlives a crash. A name is never put twice."""

    def get(self, name: str, at_most: int) -> bytes:
        """An object, or its first `at_most` bytes. Raises `KeyError` if there is none."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete up to `PAGE` objects; some may be gone already."""

    def older(self, seconds: float) -> Iterator[list[str]]:
        """The names of all that was put at least so long ago, up to `PAGE` at a time; not of what else is there.

        By the clock of the place: that of this process may be wrong by days, and what it makes older is deleted. What cannot be
        listed holds up nothing else: the first error is raised once all else is given.
        """


def object_store(address: str) -> ObjectStore:
    """The store at `file:///a/directory` or `s3://bucket/prefix`. Does not connect. Raises `ValueError`."""
    try:
        parts = urlsplit(address)
    except ValueError:  # whose text has parts of the address
        raise ValueError("must be file:///a/directory or s3://bucket/prefix") from None
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("must be file:///a/directory or s3://bucket/prefix, and nothing else")
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from .files import Files

        return Files(unquote(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        from .s3 import Bucket

        return Bucket(parts.netloc, parts.path.strip("/"))
    raise ValueError("must be file:///a/directory or s3://bucket/prefix")


def are_one_place(one: ObjectStore | None, other: ObjectStore | None) -> bool:
    """Whether two stores are one place, or one of them is in the other, as far as their kinds tell."""
    if one is None or other is None:
        return False
    # of this library's own: what all their objects' addresses begin with
    places = [str(where) for each in (one, other) if (where := getattr(each, "where", None)) is not None]
    if len(places) == 2:
        return places[0].startswith(places[1]) or places[1].startswith(places[0])
    return type(one) is type(other) and getattr(one, "__dict__", one) == getattr(other, "__dict__", other)


def keep(store: ObjectStore, text: str) -> str:
    """Put a long result there. Returns the reference that its record keeps."""
    data = text.encode()
    reference = references.new_reference(data)
    store.put(reference.name, data)
    return str(reference)


def forget(store: ObjectStore | None, texts: Sequence[str]) -> None:
    """Delete what was put for these stored results, to which no record refers. What fails is left to the sweep."""
    names = [references.reference(text).name for text in texts if references.is_reference(text)]
    if store is None or not names:
        return
    try:
        store.delete(names)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        log.warning("objects_left", many=len(names), error=type(error).__name__)


def fetch(store: ObjectStore | None, text: str) -> str:
    """A stored result, from there if it is a reference. Raises `ResultUnreadable`, and what the store raises."""
    if not references.is_reference(text):
        return text
    reference = references.reference(text)
    if store is None:
        raise ResultUnreadable(
            "result: is kept elsewhere; set idempotency_large_results_at, to the same in all processes"
        )
    try:
        data = store.get(reference.name, reference.size + 1)  # what is longer than it has to be is not read
    except KeyError:
        raise ResultUnreadable(f"result: {reference.name} is gone from idempotency_large_results_at") from None
    return references.checked(reference, data)
