"""What operators see of a process: logs, counters, and named moments for tests."""
