"""Settings that every test shares."""

from hypothesis import settings

settings.register_profile("etude", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("etude")
