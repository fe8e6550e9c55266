"""Logs, counters, and the crash points that tests use."""
