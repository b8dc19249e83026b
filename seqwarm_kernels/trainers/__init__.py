"""Sequence-length warmup, and monitors of the optimizer, in trainers that people use already."""
