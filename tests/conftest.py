"""Settings and fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tiny_folder import save_tiny

# A loaded machine may take a second over an example that usually takes a millisecond; that is no failure.
settings.register_profile("secondguess", deadline=None)
settings.load_profile("secondguess")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its drafters."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))
