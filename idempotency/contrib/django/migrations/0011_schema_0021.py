"""The library's tables at revision 0021: the archive of dead letters, and what people have corrected in them."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0010_schema_0020")]
    operations = [migrations.RunPython(migrate_to("0021"))]
