"""The pytest plugin: two fixtures for the tests of an application's own tasks.

A module beside the package, so that a pytest run which uses neither fixture imports nothing of the library, nor Celery
and SQLAlchemy with it, which a conftest may have to configure or patch first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from idempotency.testing import AssertIdempotent, RecordingServer


@pytest.fixture
def recording_server() -> Iterator[RecordingServer]:
    """An HTTP server in the provider's place: records every call, acts once per `Idempotency-Key`.

    Hand its `url` to the code under test; `answer` is a function of yours from the call to its answer.
    """
    from idempotency.testing import RecordingServer

    server = RecordingServer()
    yield server
    server.close()


@pytest.fixture
def assert_idempotent(recording_server: RecordingServer) -> AssertIdempotent:
    """Crash, double and overtake a task at every point, and fail at the first difference from a plain run."""
    from idempotency.testing import AssertIdempotent

    return AssertIdempotent(recording_server)
