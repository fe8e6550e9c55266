"""Sagas that wait while their code changes: `make saga-deploy`."""
