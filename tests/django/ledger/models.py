from __future__ import annotations

from django.db import models


class Entry(models.Model):
    account = models.CharField(max_length=100)
    amount = models.IntegerField(default=1)
    at = models.DateTimeField(auto_now_add=True)
    details = models.JSONField(default=dict)

    class Meta:
        app_label = "ledger"
