"""The middleware for HTTP, against real servers."""
