"""What Django takes over from the library: its database, its connection in a body, and its rules for transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from celery import Celery, _state, current_app
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session

from ...attempt.runtime import Runtime
from ...errors import CallRefused, SettingsError
from ...framework import Framework
from .databases import database_alias, database_url, is_same_database
from .orm import AttemptWrapper, joined, own_wrapper
from .testing import is_in_test_case, test_runtime


class Django(Framework):
    """The library in a Django project."""

    command = "manage.py idempotency"

    def database_url(self) -> str:
        return database_url(database_alias())

    def runtime(self, app: Celery) -> Runtime | None:
        wrapper = own_wrapper(database_alias())
        return test_runtime(app, wrapper) if is_in_test_case(wrapper) else None

    def joined(self, open_session: Callable[[], Session], *, ends: bool) -> AbstractContextManager[object]:
        return joined(database_alias(), open_session, ends=ends)

    def check_no_transaction(self) -> None:
        alias = database_alias()
        for wrapper in connections.all(initialized_only=True):
            if _is_open(wrapper) and is_same_database(wrapper, alias):
                raise CallRefused(
                    "eager call inside transaction.atomic(): the task would commit by itself, even if the block is "
                    "rolled back; use enqueue(), or call it after the block"
                )


def _is_open(wrapper: BaseDatabaseWrapper) -> bool:
    if wrapper.in_atomic_block:
        return not wrapper.atomic_blocks[-1]._from_testcase  # even before its first query
    if wrapper.connection is None or wrapper.autocommit:
        return False
    status: TransactionStatus = wrapper.connection.info.transaction_status
    return status != TransactionStatus.IDLE


@contextmanager
def current_transaction() -> Iterator[Any]:
    """What an outbox row is written on: the transaction that Django has open, or else one that commits when this is left.

    In a body it is the attempt's session.
    """
    alias = database_alias()
    wrapper = connections[alias]
    if isinstance(wrapper, AttemptWrapper):
        wrapper.validate_no_broken_transaction()
        yield wrapper.session
        return
    with nullcontext() if wrapper.in_atomic_block else transaction.atomic(alias), wrapper.wrap_database_errors:
        wrapper.ensure_connection()
        wrapper.validate_no_broken_transaction()
        yield wrapper.connection


def celery_app() -> Celery:
    """The project's Celery application. Raises `SettingsError` if none was made."""
    if _state.default_app is None:
        raise SettingsError(
            "no Celery application: import it in the project's package, as Celery's guide for Django says"
        )
    app: Celery = current_app._get_current_object()
    return app
