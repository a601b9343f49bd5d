"""What ``model.generate(..., custom_generate=FOLDER)`` loads."""

from secondguess.integrations.transformers.decode import generate

__all__ = ["generate"]
