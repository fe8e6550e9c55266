"""What the package promises to importers. A name is added or taken away on purpose, here and there."""

from __future__ import annotations

import importlib
import pkgutil
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
        "WrongCell",
        "apublish",
        "content_hash",
        "idempotent_task",
        "lookup",
        "publish",
        "runtime_for",
        "subscribe",
        "use_cells",
    ]


def test_the_public_names_are_sorted_and_exist() -> None:
    assert idempotency.__all__ == sorted(set(idempotency.__all__))
    for name in idempotency.__all__:
        assert getattr(idempotency, name).__doc__, name


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(idempotency).joinpath("py.typed").is_file()


def test_no_module_hides_a_public_name_once_it_is_imported() -> None:
    """A submodule becomes an attribute of its package: imported later, it would replace a function of its name."""
    packages = [each for each in pkgutil.walk_packages(idempotency.__path__, "idempotency.") if each.ispkg]
    hidden = {
        f"{each.name}.{module.name}"
        for each in packages
        if each.name != "idempotency.contrib.django.migrations"
        for package in [importlib.import_module(each.name)]
        for module in pkgutil.iter_modules(package.__path__)
        if module.name in getattr(package, "__all__", ())
    }
    assert len(packages) > 10
    assert hidden == set()
