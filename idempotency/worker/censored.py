"""Secrets of ours in what Celery shows of a configuration: `celery inspect conf`, `celery report`, the pages of Flower.

Celery hides settings whose names have one of its words in them, such as DATABASE, and passwords in addresses of brokers and
backends. The rest of ours would be shown as they are, if they are given as plain text.
"""

from __future__ import annotations

import re

from celery.app import utils

from ..settings import PREFIX, Settings

# Celery 5.5 hides the password in `broker_url` alone.
OTHERS = ("broker_read_url", "broker_write_url")


def hide_secrets() -> None:
    """Make Celery hide the settings of ours that are secrets. Idempotent."""
    names = [PREFIX + name for name, field in Settings.model_fields.items() if "SecretStr" in repr(field.annotation)]
    ours = "|".join([*names, *OTHERS])
    pattern = utils.HIDDEN_SETTINGS.pattern
    if ours not in pattern:
        utils.HIDDEN_SETTINGS = re.compile(f"{pattern}|{ours}", re.IGNORECASE)
