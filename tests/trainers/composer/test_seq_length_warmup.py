"""SeqLengthWarmup in Composer's own trainer."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer.core import Event, Time, Timestamp
from composer.functional import set_batch_sequence_length as composers_set_batch_sequence_length
from torch.utils.data import DataLoader

from seqwarm_kernels.schedule import watch
from seqwarm_kernels.trainers.composer import Alibi, SeqLengthWarmup, algorithms, set_batch_sequence_length

from .training import BATCH_SIZE, LENGTH, Run, Stream

#: 20 batches, with a ramp from 8 to 32 over 10 of them: 8 + 8 · ⌊3n / 10⌋.
LENGTHS = [8] * 4 + [16] * 3 + [24] * 3 + [32] * 10


def warmup(**options):
    return SeqLengthWarmup(**{"duration": 0.5, "min_seq_length": 8, "max_seq_length": 32, "step_size": 8, **options})


def state_at(timestamp, max_duration, dataloader_len=None, device="cpu"):
    """The part of a trainer's state that the algorithm reads."""
    return SimpleNamespace(
        batch={"input_ids": torch.zeros(2, 4096)},
        timestamp=timestamp,
        max_duration=None if max_duration is None else Time.from_timestring(max_duration),
        dataloader_len=None if dataloader_len is None else Time(dataloader_len, "ba"),
        device=SimpleNamespace(name=device),
        fsdp_enabled=False,
    )


def length_at(algorithm, *state):
    state, logger = state_at(*state), SimpleNamespace(log_metrics=lambda metrics: None)
    algorithm.apply(Event.AFTER_DATALOADER, state, logger)
    return state.batch["input_ids"].shape[1]


def test_batches_without_a_label_left(monkeypatch, recwarn):
    monkeypatch.setattr(watch, "PATIENCE", 3)
    labels = torch.full((2, 12), -100)
    labels[:, -1] = 1
    algorithm, logger = warmup(), SimpleNamespace(log_metrics=lambda metrics: None)
    for _ in range(5):
        state = state_at(Timestamp(), "20ba")
        state.batch = {"input_ids": torch.ones(2, 12), "labels": labels}
        algorithm.apply(Event.AFTER_DATALOADER, state, logger)
    [found] = recwarn
    assert "3 batches were resized to 8 tokens" in str(found.message)


def test_dataloaders_without_a_length():
    stream = DataLoader(Stream(), batch_size=BATCH_SIZE)
    assert Run("20ba", warmup(), dataloader=stream).fit().seen.lengths == LENGTHS
    assert Run("2ep", warmup(), dataloader=stream, train_subset_num_batches=10).fit().seen.lengths == LENGTHS
    for max_duration in ("2ep", "10iter", "10sec"):
        with pytest.raises(ValueError, match="max_duration"):
            length_at(warmup(), Timestamp(), max_duration)


def test_a_hugging_face_model_gets_the_window():
    """Composer drops what the model's forward does not name."""
    algorithms = warmup(min_seq_length=16, step_size=16, mode="window"), Alibi(LENGTH, 1)
    run, windows = Run("6ba", *algorithms, device_train_microbatch_size=2), []
    hook = run.model.model.register_forward_pre_hook
    hook(lambda model, args, kwargs: windows.append(kwargs["window"]), with_kwargs=True)
    run.fit()
    assert windows[-12:] == [15] * 6 + [31] * 6
    assert run.seen.shapes == [(BATCH_SIZE, LENGTH)] * 6


@pytest.mark.parametrize(("duration", "batches", "end"), [(0.1, 30, 3), (5 / 6, 6, 5), (1, 9, 9)])
def test_the_full_length_is_reached_exactly_at_the_end_of_the_duration(duration, batches, end):
    """In floating-point numbers, some of these ends are 3.0000000000000004 or 4.999999999999999."""
    algorithm = SeqLengthWarmup(duration, 8, 1024, 8)
    assert length_at(algorithm, Timestamp(batch=end), f"{batches}ba") == 1024
    assert length_at(algorithm, Timestamp(batch=end - 1), f"{batches}ba") < 1024
    token = 10**9
    assert length_at(algorithm, Timestamp(token=end * token), f"{batches * token}tok") == 1024
    assert length_at(algorithm, Timestamp(token=end * token - 1), f"{batches * token}tok") < 1024


def test_epochs_that_end_early_do_not_delay_the_ramp():
    after_short_epochs = Timestamp(epoch=2, batch=14, batch_in_epoch=0)
    assert length_at(SeqLengthWarmup(0.5, 8, 1024, 8), after_short_epochs, "4ep", 10) == 1024


@pytest.mark.parametrize("device", ["cpu", "gpu"], ids=["host", "device"])
def test_memory_is_claimed_once_and_on_a_device_with_an_allocator(device, monkeypatch):
    claimed = []
    monkeypatch.setattr(algorithms, "claim_memory", lambda state, batch, *others: claimed.append(batch))
    algorithm = warmup()
    for batch in range(3):
        length_at(algorithm, Timestamp(batch=batch), "9ba", None, device)
    assert [batch["input_ids"].shape for batch in claimed] == ([(2, 32)] if device == "gpu" else [])


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("length", [1, 8, 13])
def test_equal_to_composers_function_where_that_is_correct(length, truncate, preserve):
    """Padding is on the right, and every row has a valid token."""
    valid = torch.randint(1, 13, (5, 1))
    batch = {
        "input_ids": torch.randint(0, 100, (5, 12)),
        "attention_mask": (torch.arange(12) < valid).long(),
        "labels": torch.randint(-100, 100, (5, 12)),
    }
    theirs = composers_set_batch_sequence_length(dict(batch), length, truncate, preserve)
    ours = set_batch_sequence_length(batch, length, truncate, preserve)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)
