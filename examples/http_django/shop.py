"""A Django project in one file; its requests with an Idempotency-Key are carried out once."""

import json
import os
from typing import Any

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.db import models
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency.attempt.runtime import Runtime
from idempotency.framework import framework
from idempotency.http import IdempotencyMiddleware
from idempotency.settings import Settings

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": os.environ["PGHOST"],
            "PORT": os.environ.get("PGPORT", "5432"),
            "NAME": os.environ["PGDATABASE"],
            "USER": os.environ["PGUSER"],
            "PASSWORD": os.environ.get("PGPASSWORD", ""),
        }
    },
    INSTALLED_APPS=["idempotency.contrib.django"],
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
)
django.setup()


class Payment(models.Model):
    id = models.CharField(primary_key=True, max_length=255)
    amount = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "payments"
        managed = False


@csrf_exempt
def pay(request: HttpRequest) -> JsonResponse:
    amount = json.loads(request.body)["amount"]
    attempt: Any = request.scope["state"]["idempotency"]
    attempt.run(lambda session: Payment.objects.create(id=attempt.key, amount=amount))
    if amount > 1000:
        return JsonResponse({"error": "declined"}, status=402)  # rolled back
    return JsonResponse({"id": attempt.key, "amount": amount}, status=201)  # committed with the row, then sent


urlpatterns = [path("payments", pay)]
application = IdempotencyMiddleware(
    get_asgi_application(),
    runtime=lambda: Runtime(Settings.read({"database_url": framework().database_url()})),
    required=True,
)
