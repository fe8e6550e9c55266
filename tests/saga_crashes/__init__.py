"""Every consumer and saga of the application, killed at every moment: `make saga-crashes`."""
