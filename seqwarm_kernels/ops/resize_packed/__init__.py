"""`seqwarm::resize_packed`: every tensor of a packed batch cut into pieces of its sequences, in one call."""
