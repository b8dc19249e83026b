"""Misuse that once gave wrong results without a word. More is in `tests/data/test_silent_results.py`."""

import copy
import linecache
import pickle
import warnings

import pytest
import torch
from torch import nn

from seqwarm_kernels import BatchBuffers, SequenceLengthScheduler, resize_batch

BATCH = {"input_ids": torch.arange(64).view(2, 32)}


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_a_schedule_of_tokens_is_not_stepped_by_one(unit):
    scheduler = SequenceLengthScheduler(8, 32, duration=1000, unit=unit)
    with pytest.raises(ValueError, match=f"n must be the number of {unit}s of the step"):
        scheduler.step()
    assert scheduler.progress == 0
    scheduler.step(1)
    assert scheduler.progress == 1


def test_a_duration_is_no_share_of_the_training():
    with pytest.raises(ValueError, match=r"duration=0.3 \* total_steps"):
        SequenceLengthScheduler(8, 32, duration=0.3)


class Identity(nn.Module):
    def forward(self, input_ids):
        return input_ids


def resize_often(scheduler, batches):
    for _ in range(batches):
        scheduler.resize(BATCH, copy=False)


def forward_often(scheduler, batches):
    model = Identity()
    attachment = scheduler.attach(model)
    for _ in range(batches):
        model(BATCH["input_ids"])
    attachment.remove()


@pytest.mark.parametrize("use", [resize_often, forward_often])
def test_a_scheduler_that_nobody_steps(use):
    scheduler = SequenceLengthScheduler(16, 32, duration=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(scheduler, 499)
    copies = [copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))]
    for unstepped in (scheduler, *copies):
        with pytest.warns(
            UserWarning,
            match=r"the length is still 16 after 500 batches: call scheduler.step\(\) after each optimizer step",
        ) as caught:
            use(unstepped, 1)
        line = linecache.getline(caught[0].filename, caught[0].lineno)
        assert use is forward_often or "scheduler.resize(" in line
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(unstepped, 600)


def test_no_warning_of_a_scheduler_that_somebody_steps():
    stepped, loaded, moved, without_ramp, full = (
        SequenceLengthScheduler(16, longest, duration=duration, unit="token")
        for longest, duration in ((32, 1000), (32, 1000), (32, 1000), (16, 1000), (32, 0))
    )
    state = loaded.state_dict()
    stepped.step(0)
    loaded.load_state_dict(state)
    moved.progress = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in (stepped, loaded, moved, without_ramp, full):
            resize_often(scheduler, 600)
    assert loaded.state_dict() == state


def test_an_iterator_of_names_is_not_used_up_in_silence():
    batch = {**BATCH, "allowed": torch.ones(2, 32, 32, dtype=torch.bool)}
    with pytest.raises(TypeError, match="mask_keys must be a collection of names, such as a list, got generator"):
        resize_batch(batch, 8, mask_keys=(name for name in ["allowed"]))


class MeanOfPrefix(nn.Module):
    """Predicts a label from the mean of the valid tokens up to it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask, labels):
        valid = attention_mask[..., None].float()
        means = (self.embedding(input_ids) * valid).cumsum(1) / valid.cumsum(1)  # NaN before the first valid token
        return nn.functional.cross_entropy(self.head(means).flatten(0, 1), labels.flatten())


def padded_batch(rows, length, side):
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.int64),
        "labels": torch.full((len(rows), length), -100),
    }
    for index, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(length - len(row), length)
        for name, value in {"input_ids": row, "attention_mask": 1, "labels": row}.items():
            batch[name][index, where] = value
    return batch


@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_padded_on_the_left_trains_on_its_tokens(attached):
    torch.manual_seed(0)
    model = MeanOfPrefix()
    rows = [torch.randint(50, (length,)) for length in (20, 12, 5)]
    losses = {}
    for side in ("right", "left"):
        batch = padded_batch(rows, 24, side)
        scheduler = SequenceLengthScheduler(8, 24, duration=2)
        attachment = scheduler.attach(model) if attached else None
        losses[side] = []
        for tokens in (8 + 8 + 5, 16 + 12 + 5, 20 + 12 + 5):
            losses[side].append(model(**batch) if attached else model(**scheduler.resize(batch)))
            assert attachment is None or attachment.take_seen().tokens == tokens
            scheduler.step()
        if attachment is not None:
            attachment.remove()
    torch.testing.assert_close(losses["left"], losses["right"])
    assert torch.stack(losses["left"]).isfinite().all()


IDS = torch.arange(101, 109).repeat(2, 1)
LEFT, RIGHT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8]), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("batch", "begins_masked"),
    [
        (
            {"input_ids": IDS, "attention_mask": LEFT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT},
            "attention_mask",
        ),
        (
            {
                "encoder": {"input_ids": IDS, "attention_mask": RIGHT},
                "decoder": {"input_ids": IDS, "attention_mask": LEFT},
            },
            "decoder.attention_mask",
        ),
        ({"prompt_input_ids": IDS, "prompt_attention_mask": LEFT}, "prompt_attention_mask"),
    ],
    ids=["two masks", "nested", "another name"],
)
def test_one_mask_does_not_move_the_tokens_of_another(batch, begins_masked, copy):
    for _ in range(2):  # the second call is a known one
        with pytest.raises(ValueError, match=rf"batch\['{begins_masked}'\] must begin with a valid token in each row"):
            resize_batch(batch, 3, copy=copy)
    assert resize_batch(batch, 8, copy=copy).keys() == batch.keys()  # nothing is cut


def test_batches_of_two_masks_that_begin_with_tokens():
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}
    for tensor in (resized := resize_batch(batch, 3)).values():
        assert tensor.shape == (2, 3)
    assert torch.equal(resized["decoder_input_ids"], IDS[:, :3])


def test_a_mask_to_be_added_is_not_read_as_its_opposite():
    first = {"input_ids": IDS, "attention_mask": torch.zeros(2, 8)}
    resize_batch(first, 3)
    with pytest.raises(ValueError, match=r"must be 0 where a token is hidden, got torch\.float32 with -inf"):
        resize_batch({**first, "attention_mask": torch.where(RIGHT == 1, 0.0, -torch.inf)}, 3)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_batch_without_a_label_left(as_mapping):
    class Model(nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    scheduler, model = SequenceLengthScheduler(8, 32, duration=10), Model()
    attachment = scheduler.attach(model)
    ids = torch.arange(64).view(2, 32)
    some, none, late = ids.clone(), torch.full_like(ids, -100), ids.clone()
    late[:, :16] = -100

    def forward(*micro_batches):
        for labels in micro_batches:
            batch = {"input_ids": ids, "labels": labels}
            model(batch) if as_mapping else model(**batch)
        attachment.take_seen()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for labels in (some, none):  # a batch that had none lost none
            forward(labels)
    with pytest.warns(UserWarning, match="no label of a batch is left after resizing to 8 tokens"):
        forward(late, some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(late)  # it was said


def test_options_of_an_attachment_are_checked_before_a_batch():
    scheduler, model = SequenceLengthScheduler(8, 32, duration=10), Identity()
    with pytest.raises(ValueError, match="mode must be one of"):
        scheduler.attach(model, mode="junk")
    for name in ("remainder", "seq_dim", "keep_last_token", "copy"):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            scheduler.attach(model, **{name: "junk"})
    with pytest.raises(TypeError, match="truncat"):
        scheduler.attach(model, truncat=True)
    scheduler.attach(model).remove()  # nothing was attached


def test_tokens_of_batches_in_buffers():
    """A batch is counted before the next one is written to the same memory."""
    batches = [
        {"input_ids": IDS, "attention_mask": (torch.arange(8) < length).long().repeat(2, 1)} for length in (3, 5)
    ]

    class Model(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids

    model = Model()
    attachment = SequenceLengthScheduler(6, 8, duration=10).attach(model, out=BatchBuffers(batches[0], 8))
    for batch in batches:
        model(**batch)
    assert attachment.take_seen().tokens == 2 * 3 + 2 * 5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["targets", "target", "label", "label_ids", "decoder_targets", "token_labels"])
def test_labels_of_other_names_are_neither_padding_nor_trained_twice(name, packed):
    """An entry of another name than "labels" was padded with 0, and repeated tokens kept their labels."""
    tokens = torch.arange(10, 20)[None]
    batch = {"idx": tokens, name: tokens}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    overlapping = resize_batch(batch, 4, mode="reshape", remainder="overlap")[name].flatten()
    assert overlapping.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, -100, -100, 18, 19]
    if not packed:  # a packed batch is not padded
        padded = resize_batch(batch, 4, mode="reshape", remainder="pad")[name]
        assert padded[2].tolist() == [18, 19, -100, -100]


@pytest.mark.parametrize("remainder", ["pad", "overlap"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("y", torch.int64), ("target_ids", torch.int64), ("targets", torch.float32), ("label", torch.float16)],
)
def test_padding_of_what_may_be_labels_is_asked_for(name, dtype, remainder):
    batch = {"idx": torch.arange(10)[None], name: torch.arange(10, dtype=dtype)[None]}
    options = {"mode": "reshape", "remainder": remainder}
    message = rf"^pad_values must have a value for '{name}' \({dtype}\), which may hold labels: .* with -100; rename"
    with pytest.raises(ValueError, match=message):
        resize_batch(batch, 4, **options)
    filled = resize_batch(batch, 4, **options, pad_values={name: -1})[name]
    assert (filled[2] == -1).sum() == 2
    resize_batch(batch, 4, mode="reshape")  # nothing is filled
