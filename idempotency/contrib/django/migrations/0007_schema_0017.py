"""The library's tables at revision 0017: positions of streams."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0006_schema_0016")]
    operations = [migrations.RunPython(migrate_to("0017"))]
