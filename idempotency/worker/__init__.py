"""Celery's side: the task, how it is called, and what a worker does before and after an attempt."""
