"""Records, timing, goals and processes, shared by all benchmarks."""
