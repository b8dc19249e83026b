"""Labels that an attached model does not get keep their length, which a warning says once."""

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler

from ..support.schedules import BATCH


class Predictor(nn.Module):
    """Returns predictions in a container. With labels, a loss too."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap, self.embedding = wrap, nn.Embedding(64, 5)

    def forward(self, input_ids, labels=None):
        logits = self.embedding(input_ids)
        return self.wrap(logits if labels is None else logits.mean())


@dataclass
class Output:
    logits: Any


WRAPS = {
    "tensor": lambda output: output,
    "mapping": lambda output: {"logits": output, "cache": object()},
    "tuple": lambda output: (output, None),
    "nested": lambda output: [{"logits": output}],
    "dataclass": Output,
    "beside a constant": lambda output: (torch.ones(3), output),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_labels_outside_of_an_attached_model(wrap, compiled):
    """Its last prediction was compared with the last label of the whole row."""
    model = Predictor(wrap)
    if compiled:
        model.compile(backend="eager")
    scheduler = SequenceLengthScheduler(8, 64, duration=10)
    attachment = scheduler.attach(model)
    short = torch.arange(8).view(1, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the inputs of the model were cut")
        model(short)  # is not cut
        with torch.no_grad():
            model(BATCH["input_ids"])
        model.eval()(BATCH["input_ids"])
    model.train()
    with pytest.warns(
        UserWarning, match="^the inputs of the model were cut to 8 tokens, .* one label for each row, needs no change$"
    ) as caught:
        model(BATCH["input_ids"])
    assert caught[0].filename == __file__
    assert not model._forward_hooks
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the inputs of the model were cut")
        model(BATCH["input_ids"])
    attachment.remove()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["labels", "y", "token_labels"])
def test_labels_inside_of_an_attached_model(name, compiled):
    class Takes(Predictor):
        def forward(self, input_ids, **batch):
            return super().forward(input_ids)

    model = Takes(WRAPS["tensor"])
    if compiled:
        model.compile(backend="eager")
    SequenceLengthScheduler(8, 32, duration=10).attach(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the inputs of the model were cut")
        model(BATCH["input_ids"], **{name: BATCH["input_ids"]})


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_loss_of_an_attached_model_without_labels(wrap):
    class Loss(Predictor):
        def forward(self, tokens):
            return super().forward(tokens, tokens)

    model = Loss(wrap)
    SequenceLengthScheduler(8, 32, duration=10).attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH["input_ids"])


def test_a_loss_beside_predictions():
    model = Predictor(lambda logits: {"loss": logits.mean(), "logits": logits})
    SequenceLengthScheduler(8, 32, duration=10).attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH["input_ids"])


def test_a_model_whose_first_forward_failed_can_be_copied_and_saved(tmp_path):
    """The hook for its output is there until the next call."""
    model = Predictor(WRAPS["tensor"])
    SequenceLengthScheduler(8, 32, duration=10).attach(model)
    with pytest.raises(IndexError):
        model(BATCH["input_ids"] + 64)
    model.wrap = None
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.wrap = WRAPS["tensor"]
        with warnings.catch_warnings(record=True):
            copied(BATCH["input_ids"])
    model.wrap = WRAPS["tensor"]
    with pytest.warns(UserWarning, match="the inputs of the model were cut"):
        model(BATCH["input_ids"])
    assert not model._forward_hooks
