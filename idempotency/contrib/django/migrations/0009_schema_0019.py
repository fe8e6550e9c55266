"""The library's tables at revision 0019: what the position of a stream is of."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0008_schema_0018")]
    operations = [migrations.RunPython(migrate_to("0019"))]
