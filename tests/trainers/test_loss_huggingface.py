"""The loss of cut rows in a Hugging Face Trainer is the mean over their labels; batches count once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from seqwarm_kernels import SequenceLengthScheduler, resize_batch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup
from seqwarm_kernels.utils.modules import shifts_labels

from ..support.huggingface import logged
from .test_huggingface import LENGTH, WORDS, dataset, model, trained

CUT = 2  #: length at which one label of a row has no loss, and one has


def gpt2():
    """As Transformers makes it: without `loss_type`, so that the Trainer counts the first label of each row."""
    made = model()
    made.loss_type = None
    return made


class OwnLoss(nn.Module):
    """A model whose labels are those of the tokens themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.logits = nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids, labels, num_items_in_batch=None, **others):
        loss = nn.functional.cross_entropy(self.logits(input_ids).mT, labels, reduction="sum")
        return {"loss": loss / (labels.numel() if num_items_in_batch is None else num_items_in_batch)}


def with_shifted_labels(rows):
    batch = default_collate(rows)
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return {**batch, "shift_labels": shifted.contiguous()}


class CountsAllLabels(transformers.Trainer):
    """As older versions of Transformers count, also of models with a `loss_type`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._loss_shifts_labels = False


def warmed_up(folder, made, length=CUT, **changes):
    """A trainer after two steps on rows of one length, which change no weights."""
    warmup = SequenceLengthWarmup(SequenceLengthScheduler(length, LENGTH, duration=1_000_000, step_size=1))
    return trained(folder, made, [warmup], **{"learning_rate": 0.0, "max_steps": 2, **changes})


@pytest.mark.parametrize(
    ("make", "collator", "kind"),
    [
        (gpt2, default_collate, transformers.Trainer),
        (gpt2, with_shifted_labels, transformers.Trainer),
        (OwnLoss, default_collate, transformers.Trainer),
        pytest.param(model, default_collate, CountsAllLabels, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_the_mean_over_the_labels_of_cut_rows(tmp_path, make, collator, kind):
    """The losses of GPT-2 were half as large. A class of the user's own without `loss_type` may count all labels."""
    arguments = {"given": {"data_collator": collator}, "gradient_accumulation_steps": 2, "max_steps": 1}
    warmed = warmed_up(tmp_path, make(), kind=kind, **arguments)
    cut = resize_batch(collator(dataset()[:4]), CUT)
    assert logged(warmed)[0] == pytest.approx(make().train()(**cut)["loss"].item(), rel=1e-5)


def test_a_function_of_the_loss_gets_the_count_of_cut_labels(tmp_path):
    counts = []

    def function(outputs, labels, num_items_in_batch):
        counts.append(int(num_items_in_batch))
        return outputs.logits.mean()

    warmed_up(tmp_path, gpt2(), given={"compute_loss_func": function})
    assert counts == [2 * CUT] * 2


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "shifts"),
    [
        (None, False, True),
        (None, True, False),
        ("ForCausalLM", False, True),
        ("ForConditionalGeneration", False, True),
        ("ForConditionalGeneration", True, False),
        ("CsmForConditionalGeneration", False, True),
        ("ForMaskedLM", False, False),
    ],
)
def test_which_models_shift_labels(loss_type, is_encoder_decoder, shifts):
    made = nn.Module()
    made.loss_type, made.config = loss_type, SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    assert shifts_labels(made) is shifts


class OwnMethods(transformers.Trainer):
    """A user's class that overrides what `add_to` overrides."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.logs = [], []

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.batches += [(sample["labels"].shape[1], int(count)) for sample in samples]
        return [dict(sample) for sample in samples], count

    def log(self, logs, *args, **kwargs):
        self.logs.append(logs.get("seq_length"))
        super().log(logs, *args, **kwargs)


def test_methods_of_a_class_of_your_own_see_cut_batches(tmp_path):
    warmed = warmed_up(tmp_path, gpt2(), kind=OwnMethods)
    assert type(warmed).__name__ == "OwnMethods"
    assert warmed.batches == [(CUT, 2)] * 2
    assert warmed.logs == [CUT] * 3


def test_the_trainer_counts_the_tokens_of_cut_batches(tmp_path):
    rows = [{**row, "attention_mask": (torch.arange(LENGTH) < 3).long()} for row in dataset()]
    steps = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "non_padding"}
    warmed = warmed_up(tmp_path, gpt2(), 4, data=rows, **steps)
    assert logged(warmed, "num_input_tokens_seen") == logged(warmed, "train_tokens") == [2 * 2 * 3, 2 * 2 * 2 * 3]


class Twice(transformers.Trainer):
    """Two forwards of each batch, as in R-Drop."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss + model(**inputs).loss


def test_two_forwards_of_a_batch_count_once(tmp_path):
    """Tokens were counted twice, so that the schedule ran twice as fast."""
    warmed = warmed_up(tmp_path, model(), 4, kind=Twice, gradient_accumulation_steps=2)
    assert logged(warmed, "train_tokens") == [2 * 2 * 4, 2 * 2 * 2 * 4]
