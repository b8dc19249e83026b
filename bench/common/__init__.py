"""What all benchmarks share: records, timing, goals, processes."""
