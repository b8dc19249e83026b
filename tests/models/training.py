"""The training run in every trainer's test of all families: 50 steps on rows that can be learned, with a schedule."""

import torch

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi

from .zoo import FAMILIES, VOCABULARY, make

STEPS, SAVED_AT, LENGTH, BATCH_SIZE, LEARNING_RATE = 50, 20, 32, 4, 3e-3


def trainable(name):
    """Return a converted model. Its slopes are learned, so that a checkpoint must restore them."""
    model = make(name)
    apply_alibi(model, LENGTH, learn_slopes=not FAMILIES[name].pretrained_with_alibi)
    return model.train()


def schedule():
    """Return a schedule that still grows at the step where a run is interrupted."""
    return SequenceLengthScheduler(8, LENGTH, duration=30, step_size=8)


def rows():
    """Return an epoch of 10 steps. Each row counts up from a token with its own step; 0 to 2 are special tokens."""
    starts = torch.arange(10 * BATCH_SIZE)[:, None]
    steps = 1 + starts % 3
    tokens = 3 + (starts + steps * torch.arange(LENGTH)) % (VOCABULARY - 3)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]


class Lengths:
    """Records the lengths of a model's batches, in training mode (True) and in evaluation mode (False)."""

    def __init__(self, model):
        self.seen = {True: [], False: []}
        model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, model, args, kwargs, output):
        logits = output["logits"] if isinstance(output, dict) else output
        self.seen[model.training].append(logits.shape[1])


def check_run(losses, lengths):
    """Check that an uninterrupted run learns, on the scheduled lengths, and evaluates on whole rows."""
    scheduler = schedule()
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert lengths.seen[True] == [scheduler.seq_length_at(step) for step in range(STEPS)]
    assert lengths.seen[False]
    assert set(lengths.seen[False]) == {LENGTH}


def check_resumed(losses, resumed_losses, model, resumed_model):
    """Check that a run resumed from its checkpoint ends with the same bits."""
    assert resumed_losses == losses[SAVED_AT:]
    for (name, one), other in zip(model.state_dict().items(), resumed_model.state_dict().values(), strict=True):
        assert one.equal(other), name
