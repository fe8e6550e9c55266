"""Secrets of ours in what Celery shows of a configuration: `celery inspect conf`, `celery report`, the pages of Flower.

Celery hides settings whose names have one of its words in them, such as DATABASE, and passwords in addresses of brokers and
backends. The rest of ours would be shown as they are, if they are given as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from celery.app import utils

from ..settings import PREFIX, secrets

# Celery 5.5 hides the password in `broker_url` alone, and none that is in the options of an address.
OTHERS = ("broker_read_url", "broker_write_url", "result_backend")


def hide_secrets() -> None:
    """Make Celery hide the settings of ours that are secrets. Idempotent."""
    names = [PREFIX + name for name in sorted(secrets())]
    ours = "|".join([*names, *OTHERS])
    pattern = utils.HIDDEN_SETTINGS.pattern
    if ours not in pattern:
        utils.HIDDEN_SETTINGS = re.compile(f"{pattern}|{ours}", re.IGNORECASE)
        if (shown := getattr(utils, "sanitize_url", None)) is not None:  # not before Celery 5.7
            utils.sanitize_url = _without_options(shown)


def _without_options(shown: Callable[..., Any]) -> Callable[..., Any]:
    """Celery's way to show an address, in its report, without the options behind it."""

    @wraps(shown)
    def show(url: Any, *arguments: Any, **options: Any) -> Any:
        hidden = shown(url, *arguments, **options)
        return hidden.partition("?")[0] if isinstance(hidden, str) else hidden

    return show
