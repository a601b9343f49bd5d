"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may take a second over an example that usually takes a millisecond; that is no failure.
settings.register_profile("secondguess", deadline=None)
settings.load_profile("secondguess")
