"""Training data: prompts in, the target's own answers out."""
