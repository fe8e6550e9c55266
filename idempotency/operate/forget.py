"""Forget: remove a silent process from what is watched."""

from __future__ import annotations

from dataclasses import replace

from celery import Celery

from ..application import runtime_of
from ..errors import ChangeRefused
from ..store import processes
from .change import Change, audit


def forget_process(app: Celery, name: str, change: Change) -> int:
    """Forget the processes (workers, relays, beats, streams) of this name that are silent and will not come back: their alarms end.

    Returns how many. There is an audit row for each, without the request id. Raises `ChangeRefused` if none is silent.
    """
    runtime = runtime_of(app)
    each = replace(change, request_id=None)
    with runtime.engine.begin() as connection:
        forgotten = processes.forget(connection, runtime.settings.service, name, runtime.settings.alarm_silence)
        if not forgotten:
            raise ChangeRefused(f"{name}: no process of this name is silent")
        for row in forgotten:
            details = {"kind": row.kind, "name": name, "host": row.host, "pid": row.pid}
            audit(connection, each, "forget", None, None, details=details)
    return len(forgotten)
