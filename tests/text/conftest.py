"""Hypothesis without deadlines: a slow machine is not a failure."""

from hypothesis import settings

settings.register_profile("quire", deadline=None)
settings.load_profile("quire")
