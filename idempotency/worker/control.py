"""What a body may say to Celery about its own task: retry it, or replace it. And what it may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NoReturn

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Signature, signature
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, ImproperlyConfigured
from celery.result import allow_join_result

from ..application import runtime_of
from ..errors import (
    InvalidArguments,
    ResultErased,
    UnsupportedControl,
)
from ..handle import R_co
from ..observe.logs import log
from ..wire import results
from ..wire.delivery import Delivery
from .body import RunningTask
from .calls import KeyedTask
from .following import first_of, owed
from .retrying import RetriedTask
from .using import P

# Operations that replace each other in a circle would send each other forever.
LONGEST_REPLACEMENT = 1_000


class InvalidReplacement(InvalidArguments, ImproperlyConfigured):
    """No task can be replaced with this. Celery's error, with its message."""


class ControlledTask(RunningTask[P, R_co], RetriedTask[P, R_co], Generic[P, R_co]):
    """Celery's retry and replace, for a task whose record decides. Use `IdempotentTask`."""

    abstract = True

    def replace(self, sig: Any) -> NoReturn:
        """End this operation here, and leave its result, chain and callbacks to another signature.

        The operation completes with this attempt's writes. Then `sig` is sent under its task id, and again for each
        duplicate of this operation, so its tasks should be idempotent, too. Sent like the next task of a chain: not part
        of the commit. Raises `CallRefused` for a signature that could not be sent (also an `ImproperlyConfigured` where
        Celery raises that) or is this operation itself, `UnsupportedControl` for the thousandth replacement in a row.
        """
        if self.request.replaced_task_nesting >= LONGEST_REPLACEMENT:
            raise UnsupportedControl(f"replace: at most {LONGEST_REPLACEMENT} times in a row")
        limit = runtime_of(self.app).settings.result_limit
        wrapped = {results.REPLACED: sig}  # as it is stored, always in the record: SQL looks for it there
        plain = results.from_text(results.to_text(wrapped, limit=limit, what="replacement"))[results.REPLACED]
        replacement: Signature = signature(plain, app=self.app)
        if "chord" in replacement.options:
            raise InvalidReplacement("A signature replacing a task must not be part of a chord")
        if (
            replacement.subtask_type in ("group", "chord")
            and not self.request.is_eager
            and isinstance(self.backend, DisabledBackend)
        ):
            raise InvalidArguments("replace: a group or a chord needs a result backend")
        if _is_empty_chain(replacement):
            raise InvalidReplacement("Cannot replace with an empty chain")
        for first in first_of(replacement):
            task = self.app.tasks.get(first.task)
            if isinstance(task, KeyedTask) and task._check_call(first) == self._attempt.claim.id:
                raise InvalidArguments(
                    "replace: by this operation itself, which has then ended; retry it, or give another key"
                )
        self.request.replacement = {results.REPLACED: plain}
        raise Ignore("replaced")

    def _replacement(self) -> Any:
        """The result of this attempt if its body has called `replace`, as the JSON that a duplicate reads."""
        replacement, self.request.replacement = self.request.replacement, None
        return replacement

    def _hand_over(self, result: Mapping[str, Any]) -> Any:
        """Send the replacement of an operation that is committed. Raises `Ignore`; returns its result if it is eager.

        Raises `Unanswered` if it could not be sent: it is owed, so the message has to come back. Raises
        `UnsupportedControl` if it never can be.
        """
        if self.request.replaced_task_nesting >= LONGEST_REPLACEMENT:
            raise UnsupportedControl(f"replace: at most {LONGEST_REPLACEMENT} times in a row")
        with owed(self, "its replacement"):
            return super().replace(signature(result[results.REPLACED], app=self.app))

    def _read(self, delivery: Delivery, stored: str) -> Any:
        """The stored result, for a duplicate. Raises, for a caller, what reading it raises.

        For a message it is `Ignore`, unless a time limit has come, also if the result was erased: the operation is carried out,
        and no failure, whose errbacks might undo what was done.
        """
        try:
            return runtime_of(self.app).read_result(stored)
        except Exception as error:
            if delivery.is_eager or isinstance(error, SoftTimeLimitExceeded):
                raise
            say = log.info if isinstance(error, ResultErased) else log.error
            say("result_unreadable", task=self.name, key=delivery.id.key, error=type(error).__name__)
            raise Ignore("its result cannot be read") from error

    def on_replace(self, sig: Signature) -> Any:
        if self.request.is_eager:
            with allow_join_result():  # nothing waits: each result is there when it is asked for
                return sig.apply().get()
        return super().on_replace(sig)


def _is_empty_chain(sig: Signature) -> bool:
    """Whether nothing would be sent; of an empty group something is: what takes its results, which are none."""
    return sig.subtask_type == "chain" and all(map(_is_empty_chain, sig.tasks))


def is_replacement(result: Any) -> bool:
    """Whether this is the stored result of an operation that was replaced."""
    return isinstance(result, dict) and result.keys() == {results.REPLACED}
