"""From a planned batch to tensors: cut items, collate, prepare, resume."""
