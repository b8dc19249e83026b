"""Sequence-length warmup in trainers that people use already."""
