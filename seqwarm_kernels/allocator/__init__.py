"""Allocate the memory of the longest batch before training starts."""
