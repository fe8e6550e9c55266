"""The library's tables at revision 0011. One migration for each revision of the schema: the newest names the newest."""

from django.db import migrations

from idempotency.contrib.django.schema import migrate_to


class Migration(migrations.Migration):
    # each revision of the schema is its own transaction, with its own patience for locks
    atomic = False
    operations = [migrations.RunPython(migrate_to("0011"))]
