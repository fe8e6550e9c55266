"""Incidents, one after the other, in a running system; a script that knows none of them ends each by its runbook."""
