"""What has already happened twice in a table of an application that does not use the library yet.

Nothing here needs Celery, our schema or a right to write. `table` looks at the catalogue, `naming` reads which columns name an
operation, `conditions` which rows count, `duplicates` asks.
"""
