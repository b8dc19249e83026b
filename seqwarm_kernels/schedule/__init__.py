"""How long sequences are at each point of a training."""
