"""One POST: to the address that was checked, over TLS, and no longer than it may take."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest

from idempotency.hosts import Address, Allowed
from idempotency.settings import Settings
from idempotency.webhooks import posting
from idempotency.webhooks.posting import Failure, Sender
from tests.support.receiver import Receiver, answering, dripping

BODY = '{"type":"x"}'


def resolving(*answers: str) -> Callable[[str, int], list[Address]]:
    """A resolver with another answer each time; the last one stays."""
    left = list(answers)
    return lambda host, port: [ip_address(left.pop(0) if len(left) > 1 else left[0])]


def port_of(receiver: Receiver) -> int:
    port = urlsplit(receiver.url).port
    assert port is not None
    return port


def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver, sender: Sender) -> None:
    """The name is looked up once; an answer that changes between check and connection is never asked for."""
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[Address]:
        asked.append(host)
        return [ip_address("127.0.0.1" if len(asked) == 1 else "169.254.169.254")]

    url = f"https://hooks.example:{port_of(receiver)}/a"
    answer = replace(sender, resolve=resolve).post(url, {"webhook-id": "msg_1"}, BODY)
    assert (answer.status, asked) == (204, ["hooks.example"])
    (request,) = receiver.requests
    assert request.headers["host"] == f"hooks.example:{port_of(receiver)}"


def test_a_name_that_has_moved_inside_is_refused_at_the_connection(receiver: Receiver, sender: Sender) -> None:
    public_first = resolving("93.184.215.14", "127.0.0.1")
    strict = replace(sender, allowed=Allowed(), resolve=public_first)
    assert public_first("hooks.example", 443) == [ip_address("93.184.215.14")]  # as at registration
    answer = strict.post(f"https://hooks.example:{port_of(receiver)}/", {}, BODY)
    assert (answer.failure, receiver.requests) == (Failure.ADDRESS_REFUSED, [])


def test_every_rule_holds_at_the_connection_too(receiver: Receiver, sender: Sender) -> None:
    strict = replace(sender, allowed=Allowed())
    for url in (receiver.url, f"http://localhost:{port_of(receiver)}/", "https://[::1]/", "https://169.254.169.254/"):
        assert strict.post(url, {}, BODY).failure is Failure.ADDRESS_REFUSED
    assert receiver.requests == []


def test_no_proxy_of_the_environment_is_used(
    receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert sender.post(receiver.url, {}, BODY).status == 204


def test_the_certificate_must_be_valid_for_the_name(receiver: Receiver, sender: Sender) -> None:
    here = replace(sender, allowed=Allowed.of(["other.example", "hooks.example"]), resolve=resolving("127.0.0.1"))
    assert here.post(f"https://other.example:{port_of(receiver)}/", {}, BODY).failure is Failure.TLS
    unknown = replace(here, authorities=posting._authorities(None))
    assert unknown.post(f"https://hooks.example:{port_of(receiver)}/", {}, BODY).failure is Failure.TLS
    assert receiver.requests == []


def test_what_goes_wrong_outside_is_an_answer_and_no_error(receiver: Receiver, sender: Sender) -> None:
    def unknown(host: str, port: int) -> list[Address]:
        raise socket.gaierror("no such name")

    receiver.answer = lambda request: None
    assert sender.post(receiver.url, {}, BODY).failure is Failure.CONNECTION_FAILED
    assert replace(sender, resolve=unknown).post("https://hooks.example/", {}, BODY).failure is Failure.NO_ADDRESS
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert sender.post(f"https://127.0.0.1:{port}/", {}, BODY).failure is Failure.CONNECTION_FAILED
    receiver.answer = answering(302, Location="https://169.254.169.254/")
    answer = sender.post(receiver.url, {}, BODY)
    assert (answer.status, answer.is_accepted) == (302, False)


def test_a_resolver_that_hangs_is_not_waited_for(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "RESOLVE_TIMEOUT", 0.05)
    hangs = threading.Event()
    slow = replace(sender, resolve=lambda host, port: (hangs.wait(5) and []) or [])
    assert slow.post("https://hooks.example/", {}, BODY).failure is Failure.TIMEOUT
    hangs.set()


def test_an_answer_that_drips_ends_with_its_time(receiver: Receiver, sender: Sender) -> None:
    def headers_without_end() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            time.sleep(0.02)
            yield b"x"

    hasty = replace(sender, timeout=0.3)
    with dripping(str(receiver.ca_file).removesuffix(".crt"), headers_without_end) as url:
        begun = time.monotonic()
        assert hasty.post(url, {}, BODY).failure is Failure.TIMEOUT
        assert time.monotonic() - begun < 1.0


def test_of_a_body_without_end_only_the_beginning_is_read(receiver: Receiver, sender: Sender) -> None:
    def body_without_end() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"
        while True:
            yield b"x" * 1024

    with dripping(str(receiver.ca_file).removesuffix(".crt"), body_without_end) as url:
        answer = sender.post(url, {}, BODY)
    assert (answer.status, len(answer.body)) == (200, posting.BODY_LIMIT)


@pytest.mark.long
def test_the_settings_say_what_is_allowed_and_trusted(receiver: Receiver) -> None:
    given = {"database_url": "postgresql+psycopg://x/y", "webhook_ca_file": str(receiver.ca_file)}
    assert Sender.of(Settings.read(given)).post(receiver.url, {}, BODY).failure is Failure.ADDRESS_REFUSED
    allowed = Sender.of(Settings.read(given | {"webhook_allowed_hosts": "sandbox, 127.0.0.0/8"}))
    assert allowed.post(receiver.url, {}, BODY).status == 204
