"""The fault proxy: each fault is seen to act, and the same conversation without it is seen to work."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.processes import eventually
from tests.support.proxy import Proxy

# No silence is shorter than this, and no wait is longer.
SILENCE = 0.2
PATIENCE = 10.0


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it is sent, and remembers it and how each connection ended."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.endings: list[str] = []
        echo = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                index = len(echo.heard)
                echo.heard.append(b"")
                ending, open_ = "FIN", True
                while open_:
                    data = b""
                    try:
                        data = self.request.recv(65536)
                        echo.heard[index] += data
                        if ending == "FIN":
                            self.request.sendall(data)
                    except ConnectionResetError:
                        ending = "RST"
                    except OSError:
                        ending = "broken"
                    open_ = bool(data)  # after a send that failed, what had arrived before the reset is still there
                echo.endings.append(ending)

        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE)


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Callable[[], socket.socket]]:
    with contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), PATIENCE))

        yield connect


def say(client: socket.socket, request: bytes) -> bytes:
    client.sendall(request)
    return hear(client, len(request))


def hear(client: socket.socket, number: int) -> bytes:
    """So many bytes, or as many as come before the end."""
    heard = b""
    while len(heard) < number and (data := client.recv(number - len(heard))):
        heard += data
    return heard


def is_silent(client: socket.socket) -> bool:
    client.settimeout(SILENCE)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE)
    return False


def is_reset(client: socket.socket) -> bool:
    try:
        client.recv(1)
    except ConnectionResetError:
        return True
    return False


def is_refused(connect: Callable[[], socket.socket]) -> bool:
    try:
        return is_reset(connect())
    except ConnectionResetError:  # as soon as this, even
        return True


# ---------------------------------------------------------------- transparent


def test_without_a_fault_everything_passes_in_both_directions(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    clients = [connect() for _ in range(5)]
    for number, client in enumerate(clients):
        assert say(client, b"hello %d" % number) == b"hello %d" % number
    assert (proxy.cuts, proxy.resets, proxy.refusals, proxy.swallowed) == (0, 0, 0, 0)


def test_much_more_than_one_buffer_passes_while_the_sender_sends(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client, block = connect(), bytes(range(256)) * 4096
    sender = threading.Thread(target=lambda: [client.sendall(block) for _ in range(8)])
    sender.start()
    assert hear(client, 8 * len(block)) == block * 8
    sender.join(PATIENCE)


def test_a_server_that_takes_nothing_is_felt_by_the_sender(connect: Callable[[], socket.socket], echo: Echo) -> None:
    echo.shutdown()  # it accepts no connection any more
    client = connect()
    client.settimeout(1.0)
    with pytest.raises(TimeoutError):
        client.sendall(bytes(64 << 20))


def test_the_end_of_one_direction_leaves_the_other_open(connect: Callable[[], socket.socket], echo: Echo) -> None:
    client = connect()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert hear(client, 100) == b"last words"
    assert echo.endings == ["FIN"]


def test_an_absent_server_resets_the_client_and_is_found_when_back(
    connect: Callable[[], socket.socket], proxy: Proxy, echo: Echo
) -> None:
    echo.shutdown()
    echo.socket.close()
    assert is_refused(connect)
    with socket.create_server(("127.0.0.1", echo.port)) as again:
        client = connect()
        server, _ = again.accept()
        with server:
            server.sendall(b"back")
            assert hear(client, 4) == b"back"


def test_a_reset_by_one_side_resets_the_other(connect: Callable[[], socket.socket], echo: Echo) -> None:
    client = connect()
    say(client, b"x")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    eventually(lambda: echo.endings == ["RST"])


# ---------------------------------------------------------------- an answer that never arrives


def test_the_answer_to_a_request_is_cut_after_the_server_has_it(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client, other = connect(), connect()
    assert say(client, b"BEGIN") == b"BEGIN"
    assert say(other, b"BEGIN") == b"BEGIN"
    proxy.cut_reply_to(b"COMMIT")
    assert say(client, b"and COMMIT;") == b""
    assert (proxy.cuts, echo.heard[0]) == (1, b"BEGINand COMMIT;")
    # once: the next one is answered, there and on a new connection
    assert say(other, b"COMMIT") == b"COMMIT"
    assert say(connect(), b"COMMIT") == b"COMMIT"
    assert proxy.cuts == 1


def test_the_request_may_go_on_after_the_pattern_until_its_answer_comes(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    proxy.latency(0.5)
    proxy.cut_reply_to(b"COMMIT")
    client.sendall(b"COMMIT")
    eventually(lambda: proxy._connections[0].cutting)
    assert say(client, b" AND CHAIN") == b""
    assert (proxy.cuts, echo.heard[0][:6]) == (1, b"COMMIT")


def test_requests_without_the_pattern_are_answered(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    proxy.cut_reply_to(b"COMMIT")
    assert say(connect(), b"COMMI") == b"COMMI"
    assert say(connect(), b"T ROLLBACK") == b"T ROLLBACK"  # another connection's half is no half
    assert proxy.cuts == 0


def test_a_pattern_split_over_two_reads_is_found(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    proxy.cut_reply_to(b"COMMIT")
    assert say(client, b"xxCOM") == b"xxCOM"
    assert say(client, b"MIT") == b""
    assert proxy.cuts == 1


def test_a_pattern_sent_byte_by_byte_is_found_once_per_occurrence(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    proxy.cut_reply_to(b"aa", skip=1)
    for byte in b"aaa":  # "aa" once, and half of another
        assert say(client, bytes([byte])) == bytes([byte])
    assert say(client, b"a") == b""
    assert proxy.cuts == 1


def test_what_was_sent_before_the_call_is_no_part_of_the_pattern(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    for said, half in ((b"COM", b"MIT"), (b"COM", b"MIT")):
        say(client, said)
        proxy.cut_reply_to(b"COMMIT")  # the second time a search is under way
        assert say(client, half) == half
    assert proxy.cuts == 0


def test_skipped_requests_are_answered_even_when_read_at_once(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    proxy.cut_reply_to(b"COMMIT", skip=3)
    assert say(client, b"COMMIT") == b"COMMIT"
    assert say(client, b"COMMIT COMMIT") == b"COMMIT COMMIT"
    assert say(client, b"COMMIT") == b""
    assert proxy.cuts == 1


# ---------------------------------------------------------------- latency


def test_latency_holds_back_both_directions_and_0_does_not(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    proxy.latency(0.5)
    began = time.monotonic()
    assert say(client, b"slow") == b"slow"
    assert time.monotonic() - began >= 1.0
    proxy.latency(0)
    began = time.monotonic()
    assert say(client, b"fast") == b"fast"
    assert time.monotonic() - began < 1.0


def test_latency_delays_and_does_not_throttle(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client, block = connect(), bytes(range(256)) * 4096
    proxy.latency(0.2)
    began = time.monotonic()
    assert say(client, block) == block
    # one read after the other would take (1 MiB / 64 KiB) * 0.4 s
    assert 0.4 <= time.monotonic() - began < 5.0


# ---------------------------------------------------------------- black holes


def test_requests_in_a_black_hole_never_reach_the_server(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    assert say(client, b"before") == b"before"
    proxy.black_hole("requests")
    client.sendall(b"lost")
    assert is_silent(client)
    assert (proxy.swallowed, echo.heard, echo.endings) == (4, [b"before"], [])


def test_replies_in_a_black_hole_never_reach_the_client_who_is_heard(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    proxy.black_hole("replies")
    client.sendall(b"heard")
    eventually(lambda: proxy.swallowed == 5)
    assert is_silent(client)
    assert (echo.heard, echo.endings) == ([b"heard"], [])


def test_the_server_does_not_notice_a_client_gone_behind_a_black_hole(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    say(client, b"x")
    proxy.black_hole("requests")
    client.close()
    with pytest.raises(AssertionError):
        eventually(lambda: echo.endings, timeout=SILENCE)
    proxy.heal()
    eventually(lambda: echo.endings == ["RST"])


@pytest.mark.parametrize("end", [lambda proxy: proxy.heal(), lambda proxy: proxy.black_hole(None)])
def test_at_its_end_connections_with_holes_are_reset_and_the_others_go_on(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo, end: Any
) -> None:
    holed, idle = connect(), connect()
    for client in (holed, idle):
        say(client, b"x")
    proxy.black_hole("requests")
    holed.sendall(b"lost")
    eventually(lambda: proxy.swallowed == 4)
    end(proxy)
    assert is_reset(holed)
    assert proxy.resets == 1
    assert say(idle, b"whole") == b"whole"
    assert say(connect(), b"new") == b"new"


# ---------------------------------------------------------------- resets


def test_a_reset_ends_every_open_connection_on_both_sides_and_no_later_one(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    clients = [connect() for _ in range(3)]
    for client in clients:
        say(client, b"x")
    proxy.reset()
    assert [is_reset(client) for client in clients] == [True] * 3
    eventually(lambda: echo.endings == ["RST"] * 3)
    assert proxy.resets == 3
    assert say(connect(), b"new") == b"new"


@pytest.mark.parametrize("n", [0, 1, 5, 300_000])
def test_exactly_so_many_bytes_reach_the_server_before_the_reset(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo, n: int
) -> None:
    client = connect()
    assert say(client, b"before") == b"before"
    proxy.cut_after(n, "requests")
    with contextlib.suppress(OSError):
        client.sendall(b"x" * 400_000)
        while client.recv(65536):
            pass
    eventually(lambda: echo.endings)
    assert (len(echo.heard[0]) - len(b"before"), proxy.resets) == (n, 1)


def test_the_reset_comes_with_the_last_byte_and_not_with_one_more(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    proxy.cut_after(5, "requests")
    client.sendall(b"hello")
    eventually(lambda: (echo.heard, proxy.resets) == ([b"hello"], 1))


def test_a_slow_reader_gets_every_byte_before_its_reset(proxy: Proxy, echo: Echo) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", proxy.port))
        proxy.cut_after(300_000, "replies")
        client.sendall(b"x" * 300_000)
        eventually(lambda: proxy._connections[0].replies.doomed and not proxy._connections[0].replies.waiting)
        assert len(hear(client, 300_000)) == 300_000
        assert is_reset(client)


def test_exactly_so_many_bytes_reach_each_client_until_healed(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    proxy.cut_after(3, "replies")
    for number in range(1, 4):
        client = connect()
        client.sendall(b"hello")
        assert hear(client, 3) == b"hel"
        assert is_reset(client)
        assert proxy.resets == number
    near = connect()
    assert say(near, b"he") == b"he"
    proxy.heal()
    assert say(near, b"hello") == b"hello"
    assert echo.heard == [b"hello"] * 3 + [b"hehello"]


# ---------------------------------------------------------------- refused connections


def test_new_connections_are_refused_open_ones_stay_until_it_is_healed(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    say(client, b"x")
    proxy.refuse()
    assert is_refused(connect)
    assert say(client, b"open") == b"open"
    assert (proxy.refusals, proxy.resets, len(echo.heard)) == (1, 0, 1)
    proxy.refuse(False)
    assert say(connect(), b"new") == b"new"
    proxy.refuse()
    proxy.heal()
    assert say(connect(), b"new") == b"new"


def test_healing_takes_back_what_has_not_happened_yet(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    proxy.cut_reply_to(b"COMMIT")
    proxy.latency(5)
    proxy.cut_after(100, "replies")
    proxy.heal()
    began = time.monotonic()
    assert say(client, b"COMMIT" * 100) == b"COMMIT" * 100
    assert time.monotonic() - began < 5
    assert (proxy.cuts, proxy.resets) == (0, 0)


def test_a_closed_proxy_leaves_no_connection_and_no_port(
    proxy: Proxy, connect: Callable[[], socket.socket], echo: Echo
) -> None:
    client = connect()
    say(client, b"x")
    proxy.close()
    assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert not proxy._thread.is_alive()
