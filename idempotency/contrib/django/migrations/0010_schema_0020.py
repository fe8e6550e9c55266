"""The library's tables at revision 0020: how a process was started, and operations by the key at a provider."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0009_schema_0019")]
    operations = [migrations.RunPython(migrate_to("0020"))]
