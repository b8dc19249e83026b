"""Benchmarks of the alibi_attention operator."""
