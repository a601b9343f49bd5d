"""Acceptance length and speed of decoding methods on benchmark tasks, timed live."""
