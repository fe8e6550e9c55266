"""The only place that names a table: every statement, and the schema."""
