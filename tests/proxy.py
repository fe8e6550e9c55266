"""A TCP proxy that cuts a connection at a chosen moment: the reply to a chosen request never arrives."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards a port of 127.0.0.1. `cut_reply_to(b"COMMIT")` loses the next answer to a request with these bytes:
    the server has received and processed it, the client only sees its connection break."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pattern: bytes | None = None
        self._skip = 0
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut_reply_to(self, pattern: bytes, *, skip: int = 0) -> None:
        """Lose the answer to the next request containing `pattern`, after letting `skip` such requests pass."""
        with self._lock:
            self._pattern, self._skip = pattern, skip

    def close(self) -> None:
        self._listener.close()
        for each in self._sockets:
            _end(each)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            cut = threading.Event()
            self._sockets += [client, server]
            for source, target, requests in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, target, requests, cut), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, requests: bool, cut: threading.Event) -> None:
        try:
            while data := source.recv(65536):
                if requests and self._matches(data):
                    cut.set()
                if not requests and cut.is_set():
                    # the answer is here, so the request has been carried out; nobody will learn of it
                    self.cuts += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        finally:
            _end(source)
            _end(target)

    def _matches(self, data: bytes) -> bool:
        with self._lock:
            if self._pattern is None or self._pattern not in data:
                return False
            if self._skip:
                self._skip -= 1
                return False
            self._pattern = None
            return True


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
