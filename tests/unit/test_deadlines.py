"""A request of urllib ends at its moment, whoever drips; and otherwise goes where urllib would send it."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from idempotency.deadlines import Overdue, PlainSocket, open_within
from tests.support import receiver as receivers
from tests.support.dripping import BODY, CHUNKS, HEADERS, OK, dripping

# Seconds for all of it, and after which it should long have been given up.
LIMIT, LONG = 0.4, 2.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return receivers.certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def receiver(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[receivers.Receiver]:
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    running = receivers.start(certificate)
    yield running
    running.close()


def request(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, data=json.dumps({"type": "x"}).encode())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("dripped", [HEADERS, BODY, CHUNKS], ids=["headers", "body", "chunks"])
def test_whatever_drips_ends_with_its_time(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, dripped: tuple[bytes, bytes], tls: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    with dripping(*dripped, certificate=certificate if tls else None) as server:
        begun = time.monotonic()
        with pytest.raises((Overdue, HTTPException)), open_within(request(server.url), LIMIT) as answer:
            answer.read()
        assert LIMIT - 0.1 < time.monotonic() - begun < LONG
        assert server.asked == 1


def test_a_proxy_that_drips_ends_with_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with dripping(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x") as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        begun = time.monotonic()
        with pytest.raises(URLError):
            open_within(request("https://alerts.example/a"), LIMIT)
        assert time.monotonic() - begun < LONG
    assert proxy.told == ["CONNECT alerts.example:443"]


def test_what_a_proxy_has_taken_is_left_of_the_time_of_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece would be no TLS, and comes when the time is over."""
    with dripping(b"", b"HTTP/1.1 200 OK\r\n\r\n", pause=0.6) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(URLError) as late:
            open_within(request("https://alerts.example/a"), 1.0)
    assert isinstance(late.value.reason, TimeoutError)
    assert proxy.told == ["CONNECT alerts.example:443"]


@pytest.mark.parametrize(("excepted", "by_proxy"), [("", True), ("127.0.0.1", False)])
def test_the_proxy_of_the_environment_is_asked_unless_excepted(
    monkeypatch: pytest.MonkeyPatch, excepted: str, by_proxy: bool
) -> None:
    answer = (OK + b"Content-Length: 2\r\n\r\n{}", b"")
    with dripping(*answer, pieces=0) as server, dripping(*answer, pieces=0) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", excepted)
        with open_within(request(f"{server.url}/a"), 5.0) as found:
            assert found.read() == b"{}"
    assert (proxy.told, server.told) == (([f"POST {server.url}/a"], []) if by_proxy else ([], ["POST /a"]))


def test_over_tls_the_name_and_the_authority_count(
    receiver: receivers.Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answer = receivers.answering(204)
    with open_within(request(receiver.url), 5.0) as answer:
        assert answer.status == 204
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(URLError) as unknown:
        open_within(request(receiver.url), 5.0)
    assert isinstance(unknown.value.reason, ssl.SSLCertVerificationError)


def test_no_redirect_is_followed(receiver: receivers.Receiver) -> None:
    receiver.answer = receivers.answering(302, Location=f"{receiver.url}/elsewhere")
    with pytest.raises(HTTPError) as refused:
        open_within(request(receiver.url), 5.0)
    refused.value.close()
    assert (refused.value.code, len(receiver.requests)) == (302, 1)


def test_each_read_keeps_its_own_time() -> None:
    with dripping(b"", b"", pause=10.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with PlainSocket() as plain:
            plain.connect((host, int(port)))
            plain.settimeout(0.1)
            plain.deadline = time.monotonic() + 0.3
            with plain.makefile("rb", buffering=0) as lines:
                with pytest.raises(TimeoutError) as in_time:
                    lines.read(1)
                assert not isinstance(in_time.value, Overdue)
            plain.deadline = time.monotonic() + 0.05
            with plain.makefile("rb", buffering=0) as lines, pytest.raises(Overdue):
                lines.read(1)
            with pytest.raises(Overdue):
                plain.sendall(b"x")
            assert plain.gettimeout() == 0.1
