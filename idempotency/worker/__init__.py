"""Celery's side: the task, its calls, and what a worker does before and after an attempt."""
