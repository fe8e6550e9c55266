"""Every error survives what Celery does to it: rebuilt from (type, args), and pickled."""

from __future__ import annotations

import pickle
import re

import pytest
from celery.utils.serialization import get_pickleable_exception

from idempotency import StillUnknown, errors

ALL = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value is not errors.NotConnected
    ),
    key=lambda value: value.__name__,
)
ARGUMENTS: dict[type[Exception], tuple[object, ...]] = {
    errors.Again: (1.5, "rate limited"),
    errors.NothingDone: (1.5, "rate limited"),
    errors.Defer: (1.5, "rate limited"),
    errors.NotSent: (1.5, "circuit open"),
    errors.Undecided: (1.5, "processing"),
    errors.OperationFailed: ("card declined", "card_declined"),
}


def example(kind: type[Exception]) -> Exception:
    return kind(*ARGUMENTS.get(kind, ("what went wrong",)))


def state(error: Exception) -> tuple[object, ...]:
    return type(error), str(error), error.args, vars(error)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_is_rebuilt_from_its_type_and_arguments(kind: type[Exception]) -> None:
    error = example(kind)
    assert state(type(error)(*error.args)) == state(error)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling(kind: type[Exception]) -> None:
    error = example(kind)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert state(pickle.loads(pickle.dumps(error, protocol))) == state(error)
    assert get_pickleable_exception(error) is error


@pytest.mark.parametrize("kind", ALL)
def test_an_error_reads_as_its_message(kind: type[Exception]) -> None:
    assert str(example(kind)) in {"what went wrong", "rate limited", "circuit open", "card declined", "processing"}


@pytest.mark.parametrize("kind", [kind for kind in ALL if issubclass(kind, errors.PermanentError)])
def test_a_permanent_error_has_a_code_that_may_be_given(kind: type[errors.PermanentError]) -> None:
    # by whichever limit the attempts were used up, the operation ends the same way
    named = errors.AttemptsExhausted if kind is errors.RetriesExhausted else kind
    assert kind("no").code == kind.default_code == re.sub(r"(?<!^)(?=[A-Z])", "_", named.__name__).lower()
    given = kind("no", "card_declined")
    assert given.code == "card_declined"
    assert state(type(given)(*given.args)) == state(given)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(errors.Undecided, "nan")]
    + [
        (kind, each)
        for kind in (errors.Defer, errors.NotSent, errors.Again, errors.NothingDone)
        for each in ("nan", "-nan", "inf")
    ],
)
def test_a_time_that_never_comes_is_refused_where_it_is_given(kind: type[Exception], seconds: str) -> None:
    field = "delay" if issubclass(kind, errors.Again) else "seconds"
    with pytest.raises(ValueError, match=f"^{field}: must be a finite number, got {float(seconds)}$"):
        kind(float(seconds), "later")
    with pytest.raises(ValueError, match=r"^ask_again: must be a finite number"):
        StillUnknown(float(seconds))


def test_minus_infinity_is_no_finite_number_of_seconds() -> None:
    with pytest.raises(ValueError, match=r"^delay: must be a finite number, got -inf$"):
        errors.Again(float("-inf"), ValueError())
    with pytest.raises(ValueError, match=r"^ask_again: must be a finite number, got -inf$"):
        StillUnknown(float("-inf"))


def test_a_time_that_is_over_is_now() -> None:
    assert [errors.Defer(seconds, "later").seconds for seconds in (float("-inf"), -1.0, 0.0, 2.5)] == [
        0.0,
        0.0,
        0.0,
        2.5,
    ]
    assert [errors.Again(delay, ValueError()).delay for delay in (None, -1e12, 1e300)] == [None, 0.0, 1e300]


def test_the_tree_in_the_documentation_is_the_real_one() -> None:
    drawn: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        branch = re.match(r"    ((?:│   |    )*)[├└]── (\w+(?:, \w+)*)", line)
        if branch is not None:
            depth = len(branch[1]) // 4 + 1
            for name in branch[2].split(", "):
                path = [*path[:depth], name]
                drawn[name] = path[depth - 1]
        elif line.strip() == "IdempotencyError":
            path = ["IdempotencyError"]
            drawn["IdempotencyError"] = "Exception"
        elif line.strip().startswith("Exception "):
            path = ["Exception"]
        elif line.strip() == "AssertionError":
            path = ["AssertionError"]
    assert drawn.pop("NotConnected") == "Exception"  # it is SQLAlchemy's, and built as those are
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in ALL}
    # what Celery raises for arguments that do not fit
    assert {kind: kind.__bases__[1:] for kind in ALL if len(kind.__bases__) > 1} == {
        errors.InvalidArguments: (TypeError,)
    }
