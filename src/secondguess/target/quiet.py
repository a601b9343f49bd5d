"""transformers without its progress bars and warnings: what the user should know, we say in one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator

from transformers.utils import logging


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Reading GGUF draws a bar that no switch turns off.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
