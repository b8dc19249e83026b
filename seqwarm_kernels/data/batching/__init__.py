"""The two ways to batch by length, a sampler and a stream, and what they share."""
