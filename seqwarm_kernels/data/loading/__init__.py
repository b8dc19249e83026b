"""From planned batches to tensors: prepare, collate, resume, and show progress."""
