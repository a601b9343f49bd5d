"""Other engines in the same bench: each in its own process and its own environment."""
