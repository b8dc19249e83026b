"""Arguments of warmup_allocator that are refused, each with its message."""

from contextlib import nullcontext

import numpy
import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator

from .models import Recorder, Tied

BAD_ARGUMENTS = [
    ({"max_len": 0}, ValueError, "max_len must be at least 1, got 0"),
    ({"max_len": "1024"}, TypeError, "max_len must be an int, got str"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"scheduler": SequenceLengthScheduler(8, 64, duration=5)}, ValueError, "max_len must reach .* 64, got 16"),
    (
        {"example_batch": 3},
        TypeError,
        "example_batch must be a mapping, a tensor, or a tuple or list of tensors, got int",
    ),
    ({"example_batch": {"input_ids": torch.ones(0, 4)}}, ValueError, "example_batch must have at least one row"),
    ({"model": None}, TypeError, r"model must be an nn\.Module, got NoneType"),
    ({"batch_size": "big"}, ValueError, "batch_size must be an int or 'auto', got 'big'"),
    ({"batch_size": b"x"}, TypeError, "batch_size must be an int, got bytes"),
    ({"batch_size": True}, TypeError, "batch_size must be an int, got bool"),
    ({"scheduler": b"x"}, TypeError, "scheduler must be a SequenceLengthScheduler or None, got bytes"),
    ({"optimizer": b"x"}, TypeError, "optimizer must be a torch optimizer or None, got bytes"),
    (
        {"optimizer": torch.optim.LBFGS([torch.ones(1, requires_grad=True)])},
        ValueError,
        "optimizer must have a step without a closure, got LBFGS, which needs one: leave optimizer out",
    ),
    ({"loss_fn": 3}, TypeError, "loss_fn must be callable or None, got int"),
    ({"autocast_dtype": "bfloat16"}, TypeError, "autocast_dtype must be a torch.dtype or None, got str"),
    ({"autocast_dtype": torch.int8}, ValueError, "autocast_dtype must be a floating-point dtype, got torch.int8"),
    ({"grad_scaler": True}, TypeError, "grad_scaler must be a torch.amp.GradScaler or None, got bool"),
    ({"max_grad_norm": -1e21}, ValueError, r"max_grad_norm must be positive, got -1e\+21"),
    ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be positive, got 0"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a real number, got str"),
    ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1, got 0"),
    ({"accumulation_steps": 2.0}, TypeError, "accumulation_steps must be an int, got float"),
    ({"resize_options": "reshape"}, TypeError, "resize_options must be a mapping or None, got str"),
    ({"resize_options": {"fold": 2}}, ValueError, r"resize_options must hold options of .*'mode'.*, got \['fold'\]"),
    ({"resize_options": {"return_info": True}}, ValueError, r"resize_options must hold .*, got \['return_info'\]"),
    ({"resize_options": {"mode": "cut"}}, ValueError, "mode must be one of truncate, reshape, flatten, got 'cut'"),
    ({"find_batch_size": 1}, TypeError, "find_batch_size must be True or False, got 1"),
    ({"raise_out_of_memory": "no"}, TypeError, "raise_out_of_memory must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        warmup_allocator(**{"model": Tied(), "max_len": 16, **arguments})


def test_a_closure_is_found_behind_a_learning_rate_scheduler():
    for make, wanted in ((torch.optim.SGD, None), (torch.optim.LBFGS, "optimizer must have a step without a closure")):
        model = Tied()
        optimizer = make(model.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with nullcontext() if wanted is None else pytest.raises(ValueError, match=wanted):
            warmup_allocator(model, 16, optimizer=optimizer)


@pytest.mark.parametrize(
    "arguments", [arguments for arguments, _, _ in BAD_ARGUMENTS if arguments.keys() - {"model", "example_batch"}]
)
def test_bad_arguments_are_found_before_the_model_runs(arguments):
    model = Tied()
    with pytest.raises((TypeError, ValueError)):
        warmup_allocator(model, **{"max_len": 16, **arguments})
    assert model.lengths == []


def test_ints_of_numpy_are_taken():
    model = Tied()
    rows, steps = numpy.int64(3), numpy.int32(2)
    report = warmup_allocator(
        model, numpy.int64(16), batch_size=rows, accumulation_steps=steps, max_grad_norm=numpy.float32(1)
    )
    assert (report.batch_size, report.lengths) == (3, (16,))
    assert type(report.batch_size) is type(report.lengths[0]) is int


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (
            lambda output, batch: None,
            TypeError,
            "the result of loss_fn must be a tensor with one .*, got NoneType",
        ),
        (lambda output, batch: {"loss": output}, TypeError, "the result of loss_fn must be a tensor .*, got dict"),
        (lambda output, batch: torch.ones(3), ValueError, r"the result of loss_fn must have one element, got \(3,\)"),
        (lambda output, batch: torch.ones(()), ValueError, "the result of loss_fn must depend on the parameters"),
    ],
)
def test_a_result_of_loss_fn_that_is_no_loss(loss_fn, error, message):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(error, match=message):
        warmup_allocator(model, 16, loss_fn=loss_fn, optimizer=optimizer)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_frozen_model_needs_no_graph():
    assert warmup_allocator(Tied().requires_grad_(False), 16).lengths == (16,)


def test_an_optimizer_of_another_model():
    with pytest.warns(UserWarning, match="optimizer holds no parameter of model") as caught:
        warmup_allocator(Tied(), 16, optimizer=torch.optim.AdamW(Tied().parameters()))
    assert [warning.filename for warning in caught] == [__file__]


def test_a_model_without_a_float_output():
    with pytest.raises(
        ValueError, match="loss_fn is needed: the output of the model must hold a floating-point tensor, got str"
    ):
        warmup_allocator(Recorder(lambda self, x: "done"), 8, example_batch=torch.ones(1, 2))
