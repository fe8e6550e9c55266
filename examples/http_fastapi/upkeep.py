"""What the commands of `idempotency` work on, where no Celery runs: `idempotency migrate -A upkeep`."""

import os

from celery import Celery

app = Celery("shop", set_as_current=False)  # the `service` of the runtime, whose records are purged
app.conf.update(idempotency_database_url=os.environ["DATABASE_URL"])
