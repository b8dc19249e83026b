"""The sequence length at each point of a training."""
