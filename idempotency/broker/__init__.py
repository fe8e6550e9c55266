"""Publishing with confirms."""
