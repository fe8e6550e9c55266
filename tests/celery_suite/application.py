"""The application of the suite's relay: the tasks of t/integration/tasks.py on our base."""

from __future__ import annotations

import os

from celery import Celery

from tests.celery_suite import tasks
from tests.celery_suite.configuration import configuration

tasks.install(configuration())
app = Celery("celery.tests", broker=os.environ["TEST_BROKER"], include=["t.integration.tasks"])
