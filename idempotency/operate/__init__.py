"""What people change. Each change writes its audit row itself, in the same function and the same transaction."""
