"""The library in a Django project: Django in this process, on a real Postgres."""
