"""Tasks of Django's own kind."""

from __future__ import annotations

from typing import Any

import django

from tests.django.ledger.models import Entry

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task
def post(account: str, amount: int = 1) -> dict[str, Any]:
    entry = Entry.objects.create(account=account, amount=amount)
    return {"entry": entry.pk}


@task
async def post_async(account: str, fails: bool) -> str:
    await Entry.objects.acreate(account=account)
    if fails:
        raise ValueError("after its row")
    return account


@task(takes_context=True)
def fail(context: Any, account: str) -> None:
    Entry.objects.create(account=account)
    raise ValueError(f"attempt {context.attempt} of {context.task_result.id}")
