"""The pytest plugin: two fixtures for testing an application's own tasks.

Outside the package, so that pytest does not import the library, Celery and SQLAlchemy unless a fixture is used: a
conftest may have to configure or patch them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from idempotency.testing import AssertIdempotent, RecordingServer


@pytest.fixture
def recording_server() -> Iterator[RecordingServer]:
    """An HTTP server that stands in for the provider: records every call, acts once per `Idempotency-Key`.

    Pass its `url` to the code under test. Set `answer` to a function that returns the answer to a call.
    """
    from idempotency.testing import RecordingServer

    server = RecordingServer()
    yield server
    server.close()


@pytest.fixture
def assert_idempotent(recording_server: RecordingServer) -> AssertIdempotent:
    """Crash, duplicate and overtake a task at every point; fail on the first difference from an undisturbed run."""
    from idempotency.testing import AssertIdempotent

    return AssertIdempotent(recording_server)
