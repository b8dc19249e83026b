"""Attention with linear biases (ALiBi)."""
