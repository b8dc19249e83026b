"""Windows of text."""

import torch

from seqwarm_kernels.demo.text import training_batch, validation_set

TEXT = torch.arange(1000, dtype=torch.int16)  # every token is its own position


def test_a_batch_depends_only_on_seed_and_step():
    batch = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    before = torch.get_rng_state()
    again = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    for seed, step in ((3, 8), (4, 7)):
        other = training_batch(TEXT, seed, step, batch_size=4, seq_length=16)
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_label_is_the_next_token():
    batch = training_batch(TEXT, seed=0, step=0, batch_size=64, seq_length=990)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert batch["input_ids"].min() == 0  # the first and the last window are drawn
    assert batch["labels"].max() == 999


def test_validation_windows_cover_the_text_without_overlap():
    for count, expected in ((5, 5), (1000, 62)):
        batch = validation_set(TEXT, count, seq_length=16)
        starts = batch["input_ids"][:, 0]
        assert len(starts) == expected
        assert (starts.diff() >= 16).all()
        assert (starts[0], batch["labels"][-1, -1]) == (0, 999)
