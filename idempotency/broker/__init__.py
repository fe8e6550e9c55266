"""Publishing with confirms, and what a queue holds."""
