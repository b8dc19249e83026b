"""Makes a batch as long as the schedule says."""
