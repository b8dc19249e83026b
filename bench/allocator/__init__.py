"""Benchmarks of warmup_allocator."""
