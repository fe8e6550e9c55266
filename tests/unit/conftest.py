"""How the property tests run here."""

from hypothesis import settings

# a busy machine is no failure; pytest's own time-out bounds a test that hangs
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
