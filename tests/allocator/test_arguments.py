"""Arguments of warmup_allocator that it refuses or takes, and results of the user's functions that torch refuses."""

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator

from .models import Recorder, Words

BAD_ARGUMENTS = [
    ({"max_len": 0}, ValueError, "max_len"),
    ({"batch_size": 0}, ValueError, "batch_size"),
    ({"batch_size": "auto"}, ValueError, "batch_size='auto'"),
    ({"accumulation_steps": 0}, ValueError, "accumulation_steps"),
    ({"scheduler": SequenceLengthScheduler(8, 64, duration=5)}, ValueError, "max_len"),
    ({"optimizer": torch.optim.SGD([torch.ones(1, requires_grad=True)])}, ValueError, "optimizer"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_found_before_the_model_runs(arguments, error, message):
    model = Words()
    with pytest.raises(error, match=message):
        warmup_allocator(model, **{"max_len": 16, **arguments})
    assert not model.lengths


@pytest.mark.parametrize("mark", ["DeepSpeedEngine", "ds_id", "param_idx_in_group"])
def test_models_of_deepspeed_are_refused(mark):
    """Its hooks keep gradients. tests/trainers/test_deepspeed.py has the real ones."""
    model = type(mark, (nn.Linear,), {})(4, 4)
    setattr(model.weight, mark, 0)
    with pytest.raises(ValueError, match=r"model .*deepspeed"):
        warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 4))


@pytest.mark.usefixtures("process_group")
def test_a_static_graph_is_refused():
    """It failed in an assertion of torch."""
    model = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    with pytest.raises(ValueError, match=r"model .*static_graph"):
        warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 4))


def test_an_optimizer_of_some_parameters_is_taken():
    model = Words()
    optimizer = torch.optim.AdamW([model.embedding.weight, torch.ones(1, requires_grad=True)])
    steps = []
    optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(len(optimizer.state)))
    warmup_allocator(model, 16, optimizer=optimizer)
    assert steps == [1, 1]


def test_ints_of_numpy_and_sequences_of_one_token_are_taken():
    report = warmup_allocator(Words(), numpy.int64(1), batch_size=numpy.int64(3), accumulation_steps=numpy.int32(2))
    assert (report.batch_size, report.lengths, report.out_of_memory) == (3, (1,), None)
    assert type(report.batch_size) is type(report.lengths[0]) is int


def test_a_model_without_a_float_output():
    with pytest.raises(ValueError, match="loss_fn"):
        warmup_allocator(Recorder(lambda self, x: "done"), 8, example_batch=torch.ones(1, 2))
