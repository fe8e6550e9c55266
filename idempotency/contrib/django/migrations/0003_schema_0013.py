"""The library's tables at revision 0013: API keys, and who waits for an operation's end."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0002_schema_0012")]
    operations = [migrations.RunPython(migrate_to("0013"))]
