"""What Django takes over from the library: its database, its connection in a body, and its rules for transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from asgiref.sync import sync_to_async
from celery import Celery, _state, current_app
from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test.utils import _TestState
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session

from ...attempt.runtime import Runtime
from ...errors import CallRefused, SettingsError
from ...framework import Framework
from .databases import database_alias, database_url, engine_maker, identity, is_same_database
from .orm import AttemptWrapper, joined, own_wrapper
from .testing import is_in_test_case, test_runtime


class Django(Framework):
    """The library in a Django project."""

    def database_url(self) -> str:
        return database_url(database_alias())

    def engine_maker(self, chosen: Callable[..., Any] | None) -> Callable[..., Any]:
        return engine_maker(database_alias(), chosen)

    def is_elsewhere(self, found: str) -> str | None:
        alias = database_alias()
        own = own_wrapper(alias)
        try:
            is_same = own.vendor == "postgresql" and identity(own) == found
        except DatabaseError:
            return None
        return None if is_same else f"DATABASES[{alias!r}]"

    def reader(self) -> Callable[[Callable[[], Any]], Awaitable[Any]] | None:
        # only there is the test's transaction; elsewhere that one thread has better things to do
        return (lambda read: sync_to_async(read)()) if hasattr(_TestState, "saved_data") else None

    def runtime(self, app: Celery) -> Runtime | None:
        wrapper = own_wrapper(database_alias())
        return test_runtime(app, wrapper) if is_in_test_case(wrapper) else None

    def joined(self, open_session: Callable[[], Session], *, ends: bool) -> AbstractContextManager[object]:
        return joined(database_alias(), open_session, ends=ends)

    def check_may_commit(self, session: Session) -> None:
        wrapper = connections[database_alias()]
        if isinstance(wrapper, AttemptWrapper) and wrapper.is_of(session):
            wrapper.validate_no_broken_transaction()

    def after_commit(self, session: Session) -> None:
        wrapper = connections[database_alias()]
        if isinstance(wrapper, AttemptWrapper) and wrapper.is_of(session):
            wrapper.run_after_commit()

    def check_test_transaction(self) -> None:
        raise CallRefused(
            "rolled_back, idempotency_session: Django's connection is not in this transaction, so what the ORM writes and "
            "enqueues would be committed; use django.test.TestCase, or pytest-django's db fixture"
        )

    def check_no_transaction(self) -> None:
        own = own_wrapper(database_alias())
        for wrapper in connections.all(initialized_only=True):
            if _is_open(wrapper) and (isinstance(wrapper, AttemptWrapper) or is_same_database(wrapper, own)):
                raise CallRefused(
                    "eager call inside transaction.atomic(): the task would commit by itself, even if the block is "
                    "rolled back; use enqueue(), or call it after the block"
                )


def _is_open(wrapper: BaseDatabaseWrapper) -> bool:
    if isinstance(wrapper, AttemptWrapper):
        return wrapper.is_open
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
    if not wrapper.in_atomic_block:
        _check_no_other_block(wrapper)
    with nullcontext() if wrapper.in_atomic_block else transaction.atomic(alias), wrapper.wrap_database_errors:
        wrapper.ensure_connection()
        wrapper.validate_no_broken_transaction()
        yield wrapper.connection


def _check_no_other_block(own: BaseDatabaseWrapper) -> None:
    """Raise `CallRefused` inside a transaction of another alias of this database: the message would leave without it."""
    for wrapper in connections.all(initialized_only=True):
        if wrapper is not own and _is_open(wrapper) and is_same_database(wrapper, own):
            raise CallRefused(
                f"enqueue inside transaction.atomic(using={wrapper.alias!r}): the message would leave at once, even if the "
                f"block is rolled back; use atomic(using={own.alias!r}), or give the connection: "
                f"enqueue(connections[{wrapper.alias!r}].connection, ...)"
            )


def celery_app() -> Celery:
    """The project's Celery application. Raises `SettingsError` if none was made."""
    if _state.default_app is None:
        raise SettingsError(
            "no Celery application: import it in the project's package, as Celery's guide for Django says"
        )
    app: Celery = current_app._get_current_object()
    return app
