"""What the decorator is given: a misspelt option is refused, and an application's own is not."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, exceptions

from idempotency import IdempotentTask, SettingsError
from idempotency.checks.doctor import check_configuration
from idempotency.checks.findings import Level
from idempotency.checks.settings import check_routes
from idempotency.providers import STRIPE

# The warning of a second function of one name.
DUPLICATE: Any = getattr(exceptions, "DuplicateTaskNameWarning", None)


@pytest.fixture
def app() -> Celery:
    return Celery("options", set_as_current=False)


def task(app: Celery, base: type[IdempotentTask] = IdempotentTask, **options: Any) -> Any:
    @app.task(base=base, lazy=False, shared=False, **{"name": "shop.pay"} | options)
    def pay(payment_id: str) -> None: ...

    return pay


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("kye", "key"),
        ("keys", "key"),
        ("on_fail", "on_failed"),
        ("permanent_error", "permanent_errors"),
        ("max_attempt", "max_attempts"),
        ("retention_complete", "retention_completed"),
        ("onbusy", "on_busy"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(app: Celery, given: str, meant: str) -> None:
    with pytest.raises(SettingsError) as refused:
        task(app, IdempotentTask, **{given: None})
    assert str(refused.value) == f"{given} of shop.pay: no such option; did you mean {meant}?"


@pytest.mark.parametrize(("option", "value"), [("batch_commit", "each"), ("batch_wait", 0.2)])
def test_an_option_of_batches_is_refused_where_there_is_none(app: Celery, option: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        task(app, **{option: value})
    assert str(refused.value) == f"{option} of shop.pay: does nothing without batch=, how many are claimed at once"


def test_an_option_of_batches_waits_for_a_batch_that_is_set_elsewhere(app: Celery) -> None:
    app.conf.task_annotations = {"shop.pay": {"batch": 20}, "*": {"batch_wait": 0.2}}
    assert task(app, batch_commit="each").batch == 20
    assert task(app, name="shop.refund", batch=1, batch_commit="each").batch == 1
    assert task(app, name="shop.notify").batch_wait == 0.2
    app.finalize()  # which binds them once more


@pytest.mark.parametrize(
    ("option", "value", "needed"),
    [
        ("key", 5, "a template, a function of the arguments, or None"),
        ("key", lambda: "k", "a template, a function of the arguments, or None"),
        ("on_failed", "note", "a function that takes (session, operation, error)"),
        ("on_failed", lambda operation: None, "a function that takes (session, operation, error)"),
        ("permanent_errors", "ValueError", "a tuple of exception classes"),
        ("permanent_errors", (ValueError, "KeyError"), "a tuple of exception classes"),
        ("permanent_errors", int, "a tuple of exception classes"),
        ("provider", "stripe", "a ProviderContract, as idempotency.providers has them"),
        ("effect_types", ["capture"], "a mapping of effects' names to types"),
        ("on_busy", "queue", "'ack' or 'wait'"),
        ("moves_money", "yes", "True or False"),
        ("moves_money", 1, "True or False"),
        ("max_attempts", "3", "a whole number from 1"),
        ("max_attempts", 0, "a whole number from 1"),
        ("max_attempts", True, "a whole number from 1"),
        ("retention_completed", "1", "seconds above 0, as a number"),
        ("retention_failed", 0, "seconds above 0, as a number"),
        ("retention_failed", float("nan"), "seconds above 0, as a number"),
        ("time_limit", -1, "seconds from 0, which is none, as a number"),
        ("time_limit", "3", "seconds from 0, which is none, as a number"),
        ("soft_time_limit", float("nan"), "seconds from 0, which is none, as a number"),
        ("rate_limit", "10/fortnight", "as Celery reads it: 10, '10/s', '10/m' or '10/h'"),
        ("batch", "10", "a whole number from 1 to 1000"),
    ],
)
def test_an_option_of_no_use_is_refused_with_its_task_and_what_is_needed(
    app: Celery, option: str, value: Any, needed: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        task(app, **{option: value})
    assert str(refused.value) == f"{option} of shop.pay: must be {needed}, got {value!r}"


def test_a_message_waits_for_others_for_a_minute_at_most(app: Celery) -> None:
    with pytest.raises(
        SettingsError, match=r"batch_wait of shop\.pay: must be seconds above 0 and at most 60, as a number"
    ):
        task(app, batch=10, batch_wait=61.0)


def test_a_task_whose_rate_is_limited_has_no_batch(app: Celery) -> None:
    with pytest.raises(SettingsError, match=r"batch of shop\.pay: does nothing with a rate_limit"):
        task(app, batch=10, rate_limit="10/s")


@pytest.mark.parametrize(
    ("amount", "what"),
    [
        ("{nosuch} EUR", "the task has no argument 'nosuch'"),
        ("nosuch", "the task has no argument 'nosuch'"),
        ("{payment_id} {nosuch.unit}", "the task has no argument 'nosuch'"),
        ("{payment_id", "expected '}' before end of string"),
    ],
)
def test_an_amount_names_arguments(app: Celery, amount: str, what: str) -> None:
    with pytest.raises(SettingsError) as refused:
        task(app, amount=amount)
    assert str(refused.value) == f"amount of shop.pay: {what}"


def test_an_amount_of_an_argument_is_taken(app: Celery) -> None:
    assert task(app, amount="{payment_id[total]} EUR").amount == "{payment_id[total]} EUR"


def test_an_annotation_of_no_use_is_refused_like_an_option(app: Celery) -> None:
    app.conf.task_annotations = {"*": {"max_attempts": "3"}}
    with pytest.raises(SettingsError, match=r"max_attempts of shop\.pay: must be a whole number from 1, got '3'"):
        task(app)


def test_one_class_of_permanent_errors_is_a_tuple_of_one(app: Celery) -> None:
    assert task(app, permanent_errors=ValueError).permanent_errors == (ValueError,)
    assert task(app, name="listed", permanent_errors=[ValueError, KeyError]).permanent_errors == (ValueError, KeyError)


def test_options_of_use_are_taken(app: Celery) -> None:
    made = task(
        app,
        key=lambda arguments: str(arguments["payment_id"]),
        on_failed=lambda *_: None,
        provider=STRIPE,
        effect_types={"charge": dict[str, str]},
        on_busy="wait",
        max_attempts=1,
        retention_completed=90_000,
        retention_failed=1e6,
    )
    assert (made.on_busy, made.max_attempts, made.retention_completed) == ("wait", 1, 90_000)


def test_options_of_celery_and_of_the_application_are_taken(app: Celery) -> None:
    made = task(
        app,
        key="{payment_id}",
        time_limit=5,
        autoretry_for=(OSError,),
        retry_backoff=True,
        rate_limit="1/s",
        team="books",
    )
    assert (made.key, made.time_limit, made.team) == ("{payment_id}", 5, "books")


def test_a_base_of_the_application_has_the_attributes_that_it_likes(app: Celery) -> None:
    class Base(IdempotentTask):
        keys: tuple[str, ...] = ("a",)

    assert task(app, Base, key="{payment_id}").keys == ("a",)


def pay(payment_id: str) -> None: ...


def also_pay(payment_id: str) -> None: ...


@pytest.mark.skipif(DUPLICATE is None, reason="Celery notices them since 5.7")
def test_two_functions_of_one_name_are_refused_at_the_start(app: Celery) -> None:
    make = app.task(base=IdempotentTask, lazy=False, shared=False, name="shop.pay", key="{payment_id}")
    make(pay)
    assert "shop.pay" not in refused(app)
    with pytest.warns(DUPLICATE):
        make(also_pay)
    assert "task shop.pay: two functions have this name; only the first one runs" in refused(app)


@pytest.mark.skipif(DUPLICATE is None, reason="Celery notices them since 5.7")
def test_a_function_that_a_factory_makes_again_prevents_no_start(app: Celery) -> None:
    task(app, key="{payment_id}")
    with pytest.warns(DUPLICATE):
        task(app, key="{payment_id}")
    assert "shop.pay" not in refused(app)
    assert "task shop.pay: two functions have this name" in refused(app, Level.WARNING)


def refused(app: Celery, level: Level = Level.REFUSAL) -> str:
    findings = check_configuration(app, None)
    return "\n".join(str(finding) for finding in findings if finding.level is level)


def test_a_route_by_which_the_broker_would_drop_work_is_refused(app: Celery) -> None:
    pay = task(app, name="pay")
    app.conf.update(task_routes={"pay": {"expiration": 5}})
    (finding,) = check_routes(app, [pay])
    assert (finding.level, finding.subject) == (Level.REFUSAL, "task_routes")
    assert finding.found == "expiration=5 for the idempotent task pay, need none"
    assert check_routes(app, [task(app, name="other")]) == []
