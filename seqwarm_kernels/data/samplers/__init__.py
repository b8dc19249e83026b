"""Batches that are planned window by window, assigned to ranks, and restored from a small state."""
