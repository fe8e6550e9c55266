"""The library's tables at revision 0012: records, outbox and dead letters name their application."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0001_schema_0011")]
    operations = [migrations.RunPython(migrate_to("0012"))]
