"""A Django application with one model, without uniqueness: what happened twice is there twice."""
