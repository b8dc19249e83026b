"""`seqwarm::resize_batch`: every tensor of a batch cut to a new sequence length, in one call."""
