"""The library's tables at revision 0014: sagas."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0003_schema_0013")]
    operations = [migrations.RunPython(migrate_to("0014"))]
