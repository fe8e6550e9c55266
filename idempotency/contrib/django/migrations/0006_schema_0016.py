"""The library's tables at revision 0016: results that are kept elsewhere."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0005_schema_0015")]
    operations = [migrations.RunPython(migrate_to("0016"))]
