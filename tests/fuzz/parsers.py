"""The parsers, how inputs for each are drawn, and what must be true of what it says."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import math
import re
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from functools import cache
from ipaddress import IPv6Address, ip_address
from typing import Any

import httpx
import stripe
import urllib3
from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy
from pydantic import SecretStr
from standardwebhooks import Webhook

from idempotency.errors import AddressRefused, InvalidKey
from idempotency.hosts import Allowed
from idempotency.http.key import key_of
from idempotency.webhooks.addresses import Target, target_of
from idempotency.webhooks.posting import _retry_after
from idempotency.wire.headers import KEY_HEADER, SIGNATURE_HEADER, TENANT_HEADER
from idempotency.wire.keys import MAX_KEY_LENGTH
from idempotency.wire.signing import sign, signed_at
from tasks.signatures import TOLERANCE, NotSigned, check_standard, check_stripe


@dataclass(frozen=True, slots=True)
class Parser:
    """`inputs` draws JSON values; `holds` asserts what must be true of one. What it raises is a failure."""

    name: str
    inputs: SearchStrategy[Any]
    holds: Callable[[Any], None]


# Characters that parsers fall over: separators, escapes, other digits, other blanks, halves of pairs.
ODD = "".join(
    map(chr, (0, 9, 10, 13, 32, 0x7F, 0x85, 0xA0, 0xAD, 0x2028, 0x3002, 0xFF0E, 0xFF0F, 0xFF20, 0x2460, 0x0660))
)
TEXT = some.text(
    some.sampled_from("aAzZ09 .,;:=/\\?#@%[]\"'_-+*&|" + ODD) | some.characters(codec="utf-8"), max_size=60
)


def mutated(valid: Sequence[str]) -> SearchStrategy[str]:
    """One of these, as it is or with a few of its characters removed, doubled, swapped, or others put in between."""

    def change(drawn: tuple[str, list[tuple[int, str]]]) -> str:
        text, changes = drawn
        for at, piece in changes:
            place = at % (len(text) + 1)
            text = text[:place] + piece + text[place + (at // 7) % 3 :]
        return text

    edits = some.lists(some.tuples(some.integers(0, 5000), TEXT.map(lambda text: text[:4])), max_size=4)
    return some.tuples(some.sampled_from(valid), edits).map(change)


def _is_not_repeated(given: str, error: Exception) -> None:
    # what is short may be a part of the message by chance
    assert len(given) < 12 or given not in str(error), "the message repeats what was given"


# ---------------------------------------------------------------- Idempotency-Key

_STRING = re.compile(r'"((?:[^"\\]|\\["\\])*)"', re.DOTALL)
_KEYS = ['"a-1"', "a-1", r'"a\"b\\c"', '"a,b"', '"a"; p=1', '"a", "b"', "", '"', '""', "k" * 255, f'"{"k" * 256}"']


def idempotency_key(value: str) -> None:
    """A string of RFC 8941 or a bare key, read by a pattern; and written again it is read as the same."""
    # as a server hands on a header: bytes, each a character
    text = value.encode("latin-1", "replace").decode("latin-1")
    try:
        key = key_of([(b"Idempotency-Key", text.encode("latin-1"))])
    except InvalidKey as error:
        key = None
        _is_not_repeated(text, error)
    stripped = text.strip(" \t")
    if stripped.startswith('"'):
        match = _STRING.fullmatch(stripped)
        expected = None if match is None else re.sub(r"\\(.)", r"\1", match[1])
    else:
        expected = None if "," in stripped else stripped
    if expected is not None and not (
        0 < len(expected) <= MAX_KEY_LENGTH
        and all(" " <= character <= "~" for character in expected)
        and expected.strip() == expected
    ):
        expected = None
    assert key == expected, f"read as {key!r}, by the pattern {expected!r}"
    if key is not None:
        quoted = '"' + key.replace("\\", r"\\").replace('"', r"\"") + '"'
        assert key_of([(b"idempotency-key", quoted.encode())]) == key, "quoted, it is another key"


# ---------------------------------------------------------------- the signature of a message

_SECRET, _OTHER = SecretStr("a secret of at least 32 characters"), SecretStr("another one of at least 32 characters")
_HEADERS: dict[str, Any] = {
    "task": "t",
    "id": "i",
    KEY_HEADER: "k",
    TENANT_HEADER: "a",
    "retries": 0,
    "traceparent": "00-1",
}
_BODY = '[[], {"amount": 1}, {}]'
_NOW = 1_700_000_000.0
_COVERED = {"task", "id", "retries", KEY_HEADER, TENANT_HEADER, "eta", "expires", "group", "idempotency-x"}
_VALUES = some.none() | some.booleans() | some.integers(-5, 5) | TEXT


def message_signature(given: Mapping[str, Any]) -> None:
    """Whatever is changed in a signed message, it is believed only if nothing that is covered has changed."""
    valid = sign(_HEADERS, _BODY, _SECRET, at=_NOW)
    headers = {**_HEADERS, SIGNATURE_HEADER: valid} | given["headers"]
    if given["signature"] is not None:
        headers[SIGNATURE_HEADER] = given["signature"].replace("VALID", valid)
    body = _BODY if given["body"] is None else given["body"]
    found = signed_at(headers, body, [_OTHER, _SECRET])
    if found is None:
        return
    said = {name: value for name, value in headers.items() if value is not None and name in _COVERED}
    was = {name: value for name, value in _HEADERS.items() if name in _COVERED}
    # 0 and False are equal in Python
    assert repr(sorted(said.items())) == repr(sorted(was.items())), "other headers are believed"
    assert body == _BODY, "another body is believed"
    assert headers[SIGNATURE_HEADER] == valid, "another signature is believed"
    assert found == _NOW, "another time is believed"


_MESSAGES = some.fixed_dictionaries(
    {
        "headers": some.dictionaries(some.sampled_from([*sorted(_COVERED), "traceparent", "x"]), _VALUES, max_size=3),
        "signature": some.none()
        | mutated(["VALID", "VALID", "v1 1700000000.000 00", "v2 VALID", ""])
        | _VALUES.map(str),
        "body": some.none() | mutated([_BODY, "[]", ""]),
    }
)


# ---------------------------------------------------------------- signatures of webhooks in

_STRIPE, _WEBHOOK = "whsec_stripe", "whsec_" + b64encode(b"a secret of 24 bytes ....").decode()
_EVENT = '{"id": "evt_1"}'


def stripe_signature(given: Mapping[str, Any]) -> None:
    """What is accepted has a time of now and a digest over that time and the body, computed here."""
    now = int(time.time())
    header = _filled(given["header"], now)
    body = _encoded(given["body"])
    try:
        check_stripe(body, {"stripe-signature": header}, ["whsec_old", _STRIPE])
    except NotSigned:
        return
    # as Stripe's library reads it, which leaves out what follows a second "="
    items = [(*item.split("="), "")[:2] for item in header.split(",")]
    digests = {value for name, value in items if name == "v1"}
    # of every time in the header, so that there is none to choose
    times = {int(value) for name, value in items if name == "t"}
    assert len(times) >= 1, "no time"
    first = int(next(value for name, value in items if name == "t"))
    digest = hmac.new(_STRIPE.encode(), b"%d." % first + body, hashlib.sha256).hexdigest()
    assert digest in digests, "believed without the digest of its first time"
    assert now - TOLERANCE <= first <= time.time() + TOLERANCE, "believed at another time"


def standard_signature(given: Mapping[str, Any]) -> None:
    """What is accepted has a time of now and a digest over id, time and body, computed here."""
    now = int(time.time())
    headers = {name: _filled(value, now) for name, value in given["headers"].items()}
    body = _encoded(given["body"])
    try:
        check_standard(body, headers, [_WEBHOOK])
    except NotSigned:
        return
    at = math.floor(float(headers["webhook-timestamp"]))
    signed = f"{headers['webhook-id']}.{at}.".encode() + body
    digest = hmac.new(b64decode(_WEBHOOK.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    # base64 has several spellings of the same bytes
    assert digest in [_decoded(each) for each in headers["webhook-signature"].split(" ")], "believed without its digest"
    assert now - TOLERANCE <= at <= time.time() + TOLERANCE, "believed at another time"


def _decoded(signature: str) -> bytes:
    try:
        return b64decode(signature.partition(",")[2])
    except ValueError:
        return b""


def _encoded(body: str) -> bytes:
    return body.encode("utf-8", "surrogatepass")


def _filled(text: str, now: int) -> str:
    """With real values for what stands for them: NOW, OLD, LATER, and digests for these times."""
    from datetime import UTC, datetime

    for word, at in (("NOW", now), ("OLD", now - 10 * TOLERANCE), ("LATER", now + 10 * TOLERANCE)):
        if f"STRIPE_{word}" in text:
            signature = stripe.WebhookSignature._compute_signature(f"{at}.{_EVENT}", _STRIPE)
            text = text.replace(f"STRIPE_{word}", signature)
        if f"STANDARD_{word}" in text:
            signature = Webhook(_WEBHOOK).sign("msg_1", datetime.fromtimestamp(at, UTC), _EVENT)
            text = text.replace(f"STANDARD_{word}", signature)
        text = text.replace(word, str(at))
    return text


_STRIPE_HEADERS = [
    "t=NOW,v1=STRIPE_NOW",
    "t=OLD,v1=STRIPE_OLD",
    "t=LATER,v1=STRIPE_LATER",
    "t=OLD,t=NOW,v1=STRIPE_OLD",
    "t=NOW,t=OLD,v1=STRIPE_OLD",
    "t=NOW,v1=00,v1=STRIPE_NOW,v0=1",
    "v1=STRIPE_NOW,t=NOW",
    "t=NOW,v1=",
    "t=,v1=STRIPE_NOW",
    "t=NOW",
    "",
]
_BODIES = some.sampled_from([_EVENT] * 4) | mutated([_EVENT])
_STANDARD_HEADERS = some.fixed_dictionaries(
    {
        "webhook-id": some.just("msg_1") | mutated(["msg_1", "msg_1.1"]),
        "webhook-timestamp": some.just("NOW") | mutated(["NOW", "OLD", "LATER", "nan", "inf", "1e9", "-1", "NOW.9"]),
        "webhook-signature": some.just("STANDARD_NOW")
        | mutated(["STANDARD_NOW", "STANDARD_OLD", "v1,00 STANDARD_NOW", "v1a,00 STANDARD_NOW", "STANDARD_LATER", ""]),
    }
)


# ---------------------------------------------------------------- URLs of webhooks out


def webhook_url(url: str) -> None:
    """What is accepted leads to the same public place over https, whoever reads the URL: two other readers, and inet_aton."""
    try:
        target = target_of(url, _nothing_allowed())
    except AddressRefused as error:
        _is_not_repeated(url, error)
        return
    assert target_of(target.url, _nothing_allowed()) == target, "written again, it is another place"
    for text in (url, target.url):
        _read_alike(text, target)
    try:
        packed = socket.inet_aton(target.host)
    except (OSError, UnicodeEncodeError):
        pass
    else:
        assert socket.inet_ntoa(packed) == target.host, "an address that is written in another way"
    try:
        address = ip_address(target.host)
    except ValueError:
        assert re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+", target.host), "a name of this network"
    else:
        assert (address.is_global, address.is_multicast) == (True, False), "an address that is not public"
    assert target.port == 443 or target.port >= 1024, "a port of the system"
    # what goes over the wire: one line, and no header of somebody else
    assert re.fullmatch("/[!-~]*", target.path), "a path that is no part of a request's line"
    connection = http.client.HTTPSConnection(target.host, target.port)
    assert (connection.host, connection.port) == (target.host, target.port), "http.client connects elsewhere"
    connection.putrequest("POST", target.path, skip_host=True)
    connection.putheader("Host", target.authority)


def _canonical(host: str) -> str:
    """An IPv6 address in its one short form: a client connects to the same one however it is written."""
    try:
        return str(IPv6Address(host))
    except ValueError:
        return host


def _read_alike(text: str, target: Target) -> None:
    try:
        read = httpx.URL(text)
        # `raw_host` is what it would connect to
        seen = (
            read.scheme,
            _canonical(read.raw_host.decode().strip("[]").rstrip(".")),
            read.port or 443,
            read.userinfo,
        )
    except (httpx.InvalidURL, UnicodeError, ValueError):
        assert text != target.url, "httpx refuses what we would post to"
    else:
        assert seen == ("https", target.host, target.port, b""), f"httpx would connect to {seen[1:3]}"
    try:
        parts = urllib3.util.parse_url(text)
    except urllib3.exceptions.LocationParseError:
        assert text != target.url, "urllib3 refuses what we would post to"
        return
    host = _canonical((parts.host or "").strip("[]").rstrip("."))
    assert (parts.scheme, host, parts.port or 443, parts.auth) == ("https", target.host, target.port, None), (
        f"urllib3 would connect to {host}:{parts.port}"
    )


@cache
def _nothing_allowed() -> Allowed:
    return Allowed.of(())


_HOSTS = [
    "hooks.example.com", "HOOKS.example.com.", "b\u00fccher.example", "xn--bcher-kva.example", "8.8.8.8", "127.0.0.1", "0x7f.1",
    "2130706433", "0177.0.0.1", "[2606:4700::1111]", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1%25eth0]", "localhost",
    "169.254.169.254", "metadata.google.internal", "a.b\u3002c", "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "\u24d4xample.com", "ex%61mple.com",
    "example.com@127.0.0.1", "127.0.0.1:80@example.com", "fa\u00df.example", "a_b.example.com", "-a.example.com", "8.8.8.8.",
]  # fmt: skip
_URLS = some.builds(
    "{}{}{}{}{}".format,
    some.sampled_from(
        [
            "https://",
            "https://",
            "https://",
            "HTTPS://",
            "http://",
            "https:/",
            "https:",
            "//",
            "https:///",
            "https:\\\\",
        ]
    ),
    some.sampled_from(_HOSTS) | mutated(_HOSTS),
    some.sampled_from(
        ["", "", ":443", ":8443", ":", ":0", ":22", ":65536", ":+8443", ":\uff10\uff18443", ":8443@9.9.9.9", ":0008443"]
    ),
    some.sampled_from(
        ["", "/", "/hooks", "/../x", "/%2e%2e/", "?a=b", "/?a=b#c", "#@9.9.9.9/", "/a b", "\\@9.9.9.9", "/\r\nX: y"]
    ),
    some.just("") | TEXT.map(lambda text: text[:6]),
)


# ---------------------------------------------------------------- what an answer asks for


def retry_after(text: str) -> None:
    """Seconds that can be waited for, or none; of a number, that number."""
    headers = Message()
    headers["Retry-After"] = "".join(each for each in text if each not in "\r\n")
    found = _retry_after(503, headers)  # type: ignore[arg-type]
    assert found is None or 0 <= found < math.inf
    if re.fullmatch("[0-9]{1,9}", headers["Retry-After"]):
        assert found == float(headers["Retry-After"])


_DATES = [
    "Wed, 21 Oct 2026 07:28:00 GMT",
    "Wed, 21 Oct 99999999999 07:28:00 GMT",
    "1 Jan 1 00:00 +2359",
    "120",
    "1e9",
    "-1",
]

PARSERS: Mapping[str, Parser] = {
    each.name: each
    for each in (
        Parser("idempotency_key", mutated(_KEYS) | TEXT, idempotency_key),
        Parser("message_signature", _MESSAGES, message_signature),
        Parser(
            "stripe_signature",
            some.fixed_dictionaries(
                {"header": some.sampled_from(_STRIPE_HEADERS) | mutated(_STRIPE_HEADERS) | TEXT, "body": _BODIES}
            ),
            stripe_signature,
        ),
        Parser(
            "standard_signature",
            some.fixed_dictionaries({"headers": _STANDARD_HEADERS, "body": _BODIES}),
            standard_signature,
        ),
        Parser("webhook_url", _URLS | mutated([f"https://{host}/hooks" for host in _HOSTS]) | TEXT, webhook_url),
        Parser("retry_after", mutated(_DATES) | TEXT, retry_after),
    )
}
