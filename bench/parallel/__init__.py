"""Benchmarks of attention on many devices."""
