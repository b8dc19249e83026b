"""The rule that makes batches: from the lengths of items to batches under a budget of tokens."""
