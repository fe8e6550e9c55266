"""Why a test of Celery's fails on our tasks: a decision each, and where it is explained."""

from __future__ import annotations

# By test, without the folder and the parameters.
REASONS: dict[str, str] = {}
