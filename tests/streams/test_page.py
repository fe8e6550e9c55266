"""The examples of docs/streams.md, as they are written there."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import amqp
import pytest
from kombu.utils.url import url_to_parts
from sqlalchemy import text

import services
from idempotency.application import close_runtime, runtime_of
from idempotency.streams.declaring import declared_streams
from idempotency.streams.process import run_streams
from tests.support import shell
from tests.support.documents import every_block, python_blocks
from tests.support.processes import eventually
from tests.support.streaming import Streaming


@pytest.mark.long
def test_the_page_handles_what_is_published(rabbit: Streaming, monkeypatch: Any) -> None:
    for variable in ("BROKER_URL", "DATABASE_URL"):
        monkeypatch.setenv(variable, rabbit.environment[variable])
    name = f"orders-{uuid4().hex[:8]}"  # other tests have a queue of the page's name
    parts = url_to_parts(rabbit.environment["BROKER_URL"])
    host = f"{parts.hostname}:{parts.port}"
    with amqp.Connection(host, parts.username, parts.password, virtual_host=parts.path) as connection:
        channel = connection.channel()
        for each in (name, f"{name}-paid"):
            channel.queue_declare(each, durable=True, auto_delete=False, arguments={"x-queue-type": "stream"})
        for body in ('{"id": "o1"}', '{"id": "o2"}', '{"id": "o1"}'):
            channel.basic_publish(amqp.Message(body), routing_key=name)
        namespace: dict[str, Any] = {"__name__": "page"}
        block, _, paying = python_blocks("docs/streams.md")
        exec(block.replace('"orders"', f'"{name}"'), namespace)
        provider = SimpleNamespace(charge=lambda account, *, idempotency_key: {"id": f"charged {account}"})
        exec(paying.replace('"payments"', f'"{name}-paid"'), namespace | {"provider": provider})
        channel.basic_publish(amqp.Message('{"id": "p1", "account": "a1"}'), routing_key=f"{name}-paid")
        app, stop = namespace["app"], threading.Event()
        handled = {each: declared_streams()[each] for each in (name, f"{name}-paid")}
        thread = threading.Thread(target=run_streams, args=(app, handled, stop))
        thread.start()
        try:
            eventually(lambda: len(rabbit.entries()) == 3)
        finally:
            stop.set()
            thread.join(20)
            for each in handled:
                channel.queue_delete(each)
    assert sorted(rabbit.entries()) == ["charged a1", "o1", "o2"]
    with runtime_of(app).engine.connect() as looking:
        keys = looking.execute(text("SELECT key FROM idempotency.records ORDER BY key")).scalars().all()
    assert keys == ["o1", "o2", "p1"]
    close_runtime(app)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_first_try_does_what_it_says(servers: services.Services, tmp_path: Path) -> None:
    _, *blocks = every_block("docs/streams.md")
    assert [block.language for block in blocks[:1]] == ["python"]
    (tmp_path / "shop.py").write_text(blocks[0].text)
    with shell.opened(servers, tmp_path, [f"tryout-{number}" for number in range(3)]) as opened:
        compared = shell.type_out(opened, blocks, tmp_path / "stderr")
    assert compared == len([block for block in blocks if block.language == "text"]) == 2
    assert "Traceback" not in (tmp_path / "stream.log").read_text()
