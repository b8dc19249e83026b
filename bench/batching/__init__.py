"""Benchmarks of batching by length."""
