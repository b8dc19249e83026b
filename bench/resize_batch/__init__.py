"""Benchmarks of the resize_batch operator."""
