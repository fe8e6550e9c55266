"""What a person may correct in a stored message: its arguments, as JSON, and nothing else. No I/O."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..errors import CallRefused, ChangeRefused, InvalidArguments
from ..text import masked, one_line
from ..wire import encoding, keys
from ..wire.headers import FINGERPRINT_HEADER, TENANT_HEADER
from ..wire.keys import OperationId
from ..wire.message import Message
from ..worker.calls import KeyedTask
from ..worker.keyed import shown

# What Celery has beside the arguments, of a message that had none that could be read.
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
# In the headers, for people alone: they may have the earlier arguments.
_REPR = ("argsrepr", "kwargsrepr")


def parse(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments, from `{"args": [...], "kwargs": {...}}`; either may be left out.

    Raises `ChangeRefused`, which has nothing of the values.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
    except RecursionError:
        raise ChangeRefused(f"payload: nested at most {keys.MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise ChangeRefused(f"payload: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # of Python: a limit for the digits of a number
        raise ChangeRefused("payload: a number with too many digits") from None
    if not isinstance(found, dict) or not found.keys() <= {"args", "kwargs"}:
        raise ChangeRefused('payload: must be {"args": [...], "kwargs": {...}}, with nothing else')
    args, kwargs = found.get("args", []), found.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ChangeRefused("payload: args must be a list, and kwargs an object")
    if keys.depth(found) > keys.MAX_DEPTH:
        raise ChangeRefused(f"payload: nested at most {keys.MAX_DEPTH} deep")
    try:
        args, kwargs = encoding.loads(json.dumps([args, kwargs]))
    except (ValueError, TypeError, AttributeError, ArithmeticError):
        raise ChangeRefused('payload: a value with "__type__" that is none of that type') from None
    return args, kwargs


def _refuse_constant(name: str) -> NoReturn:
    raise ChangeRefused(f"payload: {name} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two a reader takes, none says."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ChangeRefused("payload: an object has a name twice")
    return found


def arguments_of(message: Message) -> tuple[list[Any], dict[str, Any], dict[str, Any]] | None:
    """Positional and named arguments of a message, and what is beside them; None if it is not a task's."""
    try:
        args, kwargs, embed = encoding.loads(message.body)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(embed, dict | None):
        return None
    return args, kwargs, embed or {}


def edited(task: KeyedTask[..., Any], message: Message, text: str, id: OperationId) -> tuple[str, str]:
    """A message with the arguments of this JSON, for the same operation, as text; and their fingerprint.

    Checked as the arguments of a call are, and by the task's models. Raises `ChangeRefused`.
    """
    args, kwargs = parse(text)
    before = arguments_of(message)
    try:
        args, kwargs, headers = task.corrected(args, kwargs, id, is_made=_is_made(task, before, id))
        _check_models(task, args, kwargs)
    except CallRefused as refused:
        raise ChangeRefused(f"payload: {refused}") from None
    except ChangeRefused:
        raise
    except Exception as error:  # the application's own key function
        raise ChangeRefused(f"payload: its key function raised {type(error).__name__}") from None
    embed = _EMBED if before is None else before[2]
    kept = {name: value for name, value in message.headers.items() if name not in _REPR}
    task_id = kept["id"] if isinstance(kept.get("id"), str) and kept["id"] else str(uuid4())
    kept |= {"lang": "py", "task": id.task, "id": task_id, "root_id": kept.get("root_id") or task_id}
    new = replace(
        message,
        headers=kept | headers | shown(id),
        body=encoding.dumps([args, kwargs, embed]),
        properties=message.properties | {"correlation_id": task_id},
    )
    return new.to_text(), str(headers[FINGERPRINT_HEADER])


def _is_made(task: KeyedTask[..., Any], before: tuple[list[Any], dict[str, Any], Any] | None, id: OperationId) -> bool:
    """Whether the operation's key was made from its arguments; of those that cannot be read, whether the task makes keys."""
    if task.key is None:
        return False
    if before is None:
        return True
    with suppress(Exception):  # arguments that do not fit, say; or the application's own function
        return task.named_anywhere(before[0], before[1], {TENANT_HEADER: id.tenant}).id.key == id.key
    return True


def _check_models(task: KeyedTask[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check what a worker would make models of. Raises `InvalidArguments`, with nothing of the values."""
    function = inspect.unwrap(task.run)
    if function is task.run:  # nothing is made of them
        return
    hints: dict[str, Any] = {}
    with suppress(NameError, AttributeError, TypeError):  # as Celery does: then they are known to the worker alone
        hints = typing.get_type_hints(function)
    for name, value in keys.bind(task.signature_of_run, args, kwargs).items() if hints else ():
        if _has_model(hints.get(name)):
            _check_model(hints[name], name, value)


def _has_model(hint: Any) -> bool:
    return any(isinstance(each, type) and issubclass(each, BaseModel) for each in (hint, *typing.get_args(hint)))


def _check_model(model: Any, name: str, value: Any) -> None:
    try:
        TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join((name, *_fields(model, problem["loc"])))
        raise InvalidArguments(f"{where}: {problem['type']}") from None


def _fields(model: Any, place: Sequence[Any]) -> Iterator[str]:
    """The fields of models on the way to this place. A mapping's own keys are values, and named by nobody."""
    for part in place:
        if part not in (known := getattr(model, "model_fields", {})):
            return
        yield part
        model = known[part].annotation


def difference(before: str, after: str) -> Iterator[tuple[str, Any, Any]]:
    """The arguments that differ between two messages as text, by name: what each was and is; `ABSENT` where there is none."""
    was, now = (_named(text) for text in (before, after))
    for name in [*was, *(each for each in now if each not in was)]:
        if was.get(name, ABSENT) != now.get(name, ABSENT):
            yield name, was.get(name, ABSENT), now.get(name, ABSENT)


class _Absent:
    """No argument of this name."""


ABSENT = _Absent()


def difference_shown(before: str, after: str, *, with_values: bool) -> list[tuple[str, str, str]]:
    """The same for a person: kinds of values, or the values as JSON; `-` where there is none."""

    def shown(value: Any) -> str:
        if value is ABSENT:
            return "-"
        return encoding.dumps(value) if with_values else masked(value)

    return [(one_line(str(name))[:80], shown(was), shown(now)) for name, was, now in difference(before, after)]


def _named(text: str) -> dict[str, Any]:
    try:
        found = arguments_of(Message.from_text(text))
    except ValueError:
        found = None
    if found is None:
        return {"the whole message": text}
    args, kwargs, _ = found
    return {f"argument {place}": value for place, value in enumerate(args, 1)} | kwargs
