"""Records outside of Postgres, for work that may lose a little: docs/stores.md says what each store gives up."""
