"""DSpark: draft models that read the target's residual stream and guess a block of tokens at once."""
