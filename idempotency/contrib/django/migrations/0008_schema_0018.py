"""The library's tables at revision 0018: the span of an operation's last attempt, and which code has failed."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("idempotency", "0007_schema_0017")]
    operations = [migrations.RunPython(migrate_to("0018"))]
