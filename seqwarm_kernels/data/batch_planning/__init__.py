"""Rules that group items into batches under a budget of tokens, from their lengths alone."""
