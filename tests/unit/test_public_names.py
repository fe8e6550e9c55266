"""What the package promises to importers. A name is added or taken away on purpose, here and there."""

from __future__ import annotations

from importlib import resources

import idempotency


def test_the_public_names_are_these() -> None:
    assert idempotency.__all__ == [
        "AttemptsExhausted",
        "CallRefused",
        "DeduplicatedTask",
        "Defer",
        "DidNotHappen",
        "EffectInDoubt",
        "EffectMismatch",
        "EffectNameReused",
        "EffectOutcome",
        "EffectUnknown",
        "FingerprintMismatch",
        "Handle",
        "Happened",
        "IdempotencyError",
        "IdempotentTask",
        "InvalidArguments",
        "InvalidKey",
        "InvalidResult",
        "LeaseLost",
        "MissingKey",
        "NotSent",
        "OpenTransaction",
        "Operation",
        "OperationBusy",
        "OperationFailed",
        "OperationId",
        "OperationNotFound",
        "PermanentError",
        "ServiceMismatch",
        "SessionNotYours",
        "SettingsError",
        "StillUnknown",
        "StoredFailure",
        "StoredOperation",
        "StoredRefusal",
        "Undecided",
        "Unfinished",
        "UnsupportedControl",
        "apublish",
        "content_hash",
        "idempotent_task",
        "lookup",
        "publish",
        "subscribe",
    ]


def test_the_public_names_are_sorted_and_exist() -> None:
    assert idempotency.__all__ == sorted(set(idempotency.__all__))
    for name in idempotency.__all__:
        assert getattr(idempotency, name).__doc__, name


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(idempotency).joinpath("py.typed").is_file()
