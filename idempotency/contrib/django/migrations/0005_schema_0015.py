"""The library's tables at revision 0015: webhooks and the audit."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0004_schema_0014")]
    operations = [migrations.RunPython(migrate_to("0015"))]
