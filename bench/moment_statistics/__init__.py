"""Benchmarks of the moment_statistics operator and of the monitor that calls it."""
