"""A result as stored text, which every duplicate gets byte for byte. A long one is compressed."""

from __future__ import annotations

import base64
from typing import Any

from ..errors import InvalidResult, ResultErased, ResultUnreadable
from ..extras import extra
from . import encoding, references

# In the place of a result that was erased: JSON that `to_text` never makes, and that older code reads as null.
ERASED = " null"
# Before a compressed one. No JSON begins so: code that does not know it fails, and takes it for no value.
COMPRESSED = "zstd:"
# Bytes that a compressed one may have. It is read by processes whose `result_limit` is another than its writer's.
LONGEST = 64 * 1024 * 1024
# The result of an operation that was replaced: its only member, with the signature of the replacement as JSON.
REPLACED = "idempotency-replaced-by"
# How SQL recognises it; so it is never compressed.
REPLACED_BEGINS = f'{{"{REPLACED}":'


def to_text(value: Any, *, limit: int, what: str = "result", compress_above: int | None = None) -> str:
    """Encode a value as JSON like Celery's results. Raises `InvalidResult`, which names the type or the size.

    `limit` and `compress_above` are in bytes. What is longer than the latter is compressed, if the extra `zstd` is installed.
    """
    try:
        text = encoding.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResult(f"{what}: must be JSON, got {type(value).__name__} ({type(error).__name__})") from None
    if len(text) > limit:
        raise InvalidResult(f"{what}: at most {limit} bytes, got {len(text)}")
    # what is longer than `LONGEST` once it is decompressed would not be read
    if compress_above is None or not compress_above < len(text) <= LONGEST or text.startswith(REPLACED_BEGINS):
        return text
    return _compressed(text)


def from_text(text: str) -> Any:
    """Decode a stored value. Raises `ResultErased`, `MissingExtra`, and `ResultUnreadable` for what `to_text` has not written."""
    if text == ERASED:
        raise ResultErased("the operation was carried out once; its data has been erased since")
    if references.is_reference(text):
        raise ResultUnreadable("result: is kept elsewhere, where this does not look")
    return encoding.loads(plain(text))


def plain(text: str) -> str:
    """The JSON of a stored value, as it was before it was compressed. Raises `MissingExtra` and `ResultUnreadable`."""
    if not text.startswith(COMPRESSED):
        return text
    with extra("zstd"):
        import zstandard
    try:
        packed = base64.b64decode(text[len(COMPRESSED) :], validate=True)
        # The header is asked first: decompressing allocates what it says.
        size = zstandard.get_frame_parameters(packed).content_size
        if size <= LONGEST:
            return zstandard.ZstdDecompressor().decompress(packed).decode()
    except (ValueError, zstandard.ZstdError) as error:
        raise ResultUnreadable(f"result: compressed, and cannot be read ({type(error).__name__})") from None
    raise ResultUnreadable(f"result: compressed, at most {LONGEST} bytes, got {size}")


def _compressed(text: str) -> str:
    try:
        import zstandard
    except ModuleNotFoundError:
        return text
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(text.encode())
    return COMPRESSED + base64.b64encode(packed).decode()
