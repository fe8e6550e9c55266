"""A keyed request, read whole: its limits, its body, and its fingerprint."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from urllib.parse import quote

from ..wire.keys import fingerprints
from .asgi import Headers, Receive, Scope
from .body import digest, media_type_of
from .problems import refused

# Of a response's or a request's own bytes, which change when the body is decoded.
_OF_THE_CODING = (b"content-encoding", b"content-length", b"transfer-encoding")
_GZIP = (b"gzip", b"x-gzip")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a keyed request may bring. `body`: bytes, decoded. `media_types`: those accepted; None: all."""

    body: int
    media_types: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request with its whole body, decoded."""

    scope: Scope
    headers: Headers
    body: bytes

    def fingerprints(self, tenant: str) -> list[str]:
        """What makes two requests the same: method, path, query, tenant and body. By every known rule, the newest first.

        Raises `InvalidArguments` for a JSON body that is none, or that readers would read differently.
        """
        path = (self.scope.get("raw_path") or quote(self.scope["path"]).encode()).partition(b"?")[0]
        return fingerprints(
            {
                "method": self.scope["method"],
                # `/pay/` is redirected to `/pay`, or the other way round
                "path": path.removesuffix(b"/").decode("latin-1"),
                "query": self.scope.get("query_string", b"").decode("latin-1"),
                "tenant": tenant,
                "body": digest(self.body, _content_type(self.headers)),
            },
            None,
        )


async def read(scope: Scope, receive: Receive, limits: Limits) -> Request | None:
    """Read a request's body within its limits. None: the client has gone before its end.

    Raises `Refused` for a body that is too large, as soon as that is known, and for one in an unknown coding.
    """
    headers: Headers = tuple((name.lower(), value) for name, value in scope["headers"])
    coding = _coding(headers)
    _check_media_type(headers, limits)
    length = next((value for name, value in headers if name == b"content-length"), b"")
    if length.isdigit() and int(length) > limits.body:
        raise _too_large(limits)
    decoder = None if coding is None else _Gzip(limits)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        part = part if decoder is None else decoder.decode(part)
        size += len(part)
        if size > limits.body:
            raise _too_large(limits)
        parts.append(part)
        more = message.get("more_body", False)
    body = b"".join(parts)
    if decoder is not None:
        decoder.check_end()
        headers = (*_without(headers, _OF_THE_CODING), (b"content-length", b"%d" % len(body)))
    return Request(scope, headers, body)


class _Gzip:
    """Decodes a body part by part, and never more than the limit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.body
        self._stream = zlib.decompressobj(wbits=31)

    def decode(self, part: bytes) -> bytes:
        try:
            decoded = self._stream.decompress(part, self._left + 1)
        except zlib.error:
            raise _malformed("body: not gzip, as its Content-Encoding says") from None
        self._left -= len(decoded)
        if self._left < 0:
            raise _too_large(self._limits)
        return decoded

    def check_end(self) -> None:
        if not self._stream.eof or self._stream.unused_data:
            raise _malformed("body: the gzip stream does not end where the body does")


def _coding(headers: Headers) -> bytes | None:
    codings = [each for name, value in headers if name == b"content-encoding" for each in value.lower().split(b",")]
    named = [coding for each in codings if (coding := each.strip()) not in (b"", b"identity")]
    if not named:
        return None
    if len(named) == 1 and named[0] in _GZIP:
        return named[0]
    raise refused(
        415,
        "content_encoding",
        "Content-Encoding not supported",
        "Content-Encoding: gzip or none",
        headers=((b"accept-encoding", b"gzip"),),
    )


def _check_media_type(headers: Headers, limits: Limits) -> None:
    if limits.media_types is not None and media_type_of(_content_type(headers)) not in limits.media_types:
        accepted = ", ".join(sorted(limits.media_types))
        raise refused(415, "content_type", "Content-Type not supported", f"Content-Type: one of {accepted}")


def _content_type(headers: Headers) -> str:
    return next((value for name, value in headers if name == b"content-type"), b"").decode("latin-1")


def _without(headers: Headers, names: Collection[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return (header for header in headers if header[0] not in names)


def _too_large(limits: Limits) -> Exception:
    return refused(413, "body_too_large", "Body too large", f"body: at most {limits.body} bytes, decoded")


def _malformed(detail: str) -> Exception:
    return refused(400, "body_malformed", "Malformed body", detail)
