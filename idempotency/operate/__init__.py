"""What people change, each change with its audit row."""
