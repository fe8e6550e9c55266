"""Every statement that names one of our tables, and the schema."""
