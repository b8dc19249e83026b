"""Arguments of warmup_allocator that it refuses, and results of the user's functions that torch refuses."""

import numpy
import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator

from .models import Recorder, Tied
from .traces import assert_same, everything

BAD_ARGUMENTS = [
    ({"max_len": 0}, ValueError, "max_len must"),
    ({"max_len": "1024"}, TypeError, "max_len must"),
    ({"batch_size": 0}, ValueError, "batch_size must"),
    ({"batch_size": "big"}, TypeError, "batch_size must"),
    ({"batch_size": "auto"}, ValueError, "batch_size='auto' needs a device that reports .* out of memory, got cpu"),
    ({"accumulation_steps": 0}, ValueError, "accumulation_steps must"),
    ({"scheduler": SequenceLengthScheduler(8, 64, duration=5)}, ValueError, "max_len must reach .* 64, got 16"),
    (
        {"optimizer": torch.optim.SGD([torch.ones(1, requires_grad=True)])},
        ValueError,
        "optimizer must hold parameters of model",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_found_before_the_model_runs(arguments, error, message):
    model = Tied()
    with pytest.raises(error, match=message):
        warmup_allocator(model, **{"max_len": 16, **arguments})
    assert not model.lengths


def test_an_optimizer_of_some_parameters_is_taken():
    model = Tied()
    optimizer = torch.optim.AdamW([*model.batch_norm.parameters(), torch.ones(1, requires_grad=True)])
    steps = []
    optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(len(optimizer.state)))
    warmup_allocator(model, 16, optimizer=optimizer)
    assert steps == [2, 2]


def test_sequences_of_one_token():
    report = warmup_allocator(Tied(), 1, batch_size=2)
    assert (report.batch_size, report.lengths, report.out_of_memory) == (2, (1,), None)


def test_ints_of_numpy_are_taken():
    rows, steps = numpy.int64(3), numpy.int32(2)
    report = warmup_allocator(Tied(), numpy.int64(16), batch_size=rows, accumulation_steps=steps)
    assert (report.batch_size, report.lengths) == (3, (16,))
    assert type(report.batch_size) is type(report.lengths[0]) is int


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output, batch: None,
        lambda output, batch: torch.ones(3),
        lambda output, batch: output,
        lambda output, batch: output.detach().sum(),
    ],
    ids=["nothing", "several without a graph", "several", "detached"],
)
def test_what_cannot_be_a_loss_is_an_error(loss_fn):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises((AttributeError, RuntimeError)):
        warmup_allocator(model, 16, loss_fn=loss_fn, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))


def test_an_optimizer_that_needs_a_closure_is_an_error():
    model = Tied()
    optimizer = torch.optim.LBFGS(model.embedding.parameters())
    before = everything(model, optimizer)
    with pytest.raises(TypeError, match="closure"):
        warmup_allocator(model, 16, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))


def test_a_model_without_a_float_output():
    with pytest.raises(ValueError, match=r"loss_fn is needed: .* got str"):
        warmup_allocator(Recorder(lambda self, x: "done"), 8, example_batch=torch.ones(1, 2))
