"""The names that do not need Composer, and the errors when Composer is missing."""

import sys
from dataclasses import dataclass

import pytest
import torch

from seqwarm_kernels import models
from seqwarm_kernels.trainers import composer


@pytest.mark.parametrize("name", ["SeqLengthWarmup", "Alibi", "Monitor"])
def test_a_missing_composer_is_named(name, monkeypatch):
    for module in ("composer", "composer.core"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("algorithms", "monitor"):
        monkeypatch.delitem(sys.modules, f"seqwarm_kernels.trainers.composer.{module}", raising=False)
        monkeypatch.delattr(composer, module, raising=False)
    with pytest.raises(ImportError, match=rf"{name} needs Composer, which does not import: .*composer.md"):
        getattr(composer, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'GradientClipping'"):
        composer.GradientClipping  # noqa: B018


def test_apply_alibi_translates_its_arguments():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters())
    report = composer.apply_alibi(model, max_sequence_length=64, optimizers=optimizer)
    assert isinstance(report, models.SurgeryReport)
    assert report.max_seq_length == 64
    assert len(report.replaced) == 2
    assert report.dropped_from_optimizers == 1


@dataclass
class Batch:
    input_ids: torch.Tensor
    source: str


def test_batches_that_are_not_mappings():
    batch = Batch(torch.arange(12).view(2, 6), "a book")
    cut = composer.set_batch_sequence_length(batch, 3)
    assert cut.input_ids.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert cut.source == "a book"
    with pytest.raises(TypeError, match="batch must be a mutable mapping or a dataclass"):
        composer.set_batch_sequence_length(torch.arange(12).view(2, 6), 3)
