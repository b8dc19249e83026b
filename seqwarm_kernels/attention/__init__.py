"""Attention with ALiBi: the public functions, the slopes, and the share of keys attended."""
