"""Copied and pickled models that a schedule is attached to."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import BatchBuffers, SequenceLengthScheduler

from ..support.schedules import BATCH, Model, compiled_in_place, scheduler, tokens

pytestmark = pytest.mark.filterwarnings("ignore:the inputs of the model were cut")  # losses are not what is tested


def deep_copy(model):
    return copy.deepcopy(model)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.mark.parametrize("copied", [deep_copy, averaged, lambda model: copy.deepcopy({"m": copy.deepcopy(model)})["m"]])
@pytest.mark.parametrize("prepared", [lambda model: model, compiled_in_place, DistributedDataParallel])
def test_a_copied_model_follows_the_live_schedule(copied, prepared):
    if prepared is DistributedDataParallel:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, schedule = prepared(Model()), scheduler()
        attachment = schedule.attach(model)
        other = copied(model)
        model(tokens(), attention_mask=torch.ones(2, 16))
        for length in (4, 8):
            assert other(tokens(), attention_mask=torch.ones(2, 16)).shape[1] == length
            schedule.step()
        assert attachment.take_seen() == (8, 2)
        assert other._seqwarm_attachment.take_seen() == (8 + 16, 4)
        other._seqwarm_attachment.remove()
        assert other(tokens()).shape[1] == 16
        assert model(tokens()).shape[1] == 12
        del model, other
    finally:
        gc.collect()
        if prepared is DistributedDataParallel:
            torch.distributed.destroy_process_group()


def test_the_copies_of_a_model_are_detached_with_it():
    model, schedule = Model(), scheduler()
    attachment = schedule.attach(model)
    first, compiled = copy.deepcopy(model), compiled_in_place(copy.deepcopy(model))
    second, third = copy.deepcopy(first), copy.deepcopy(copy.deepcopy(model))
    gc.collect()
    second._seqwarm_attachment.remove()
    assert [module(tokens()).shape[1] for module in (model, first, second, third)] == [4, 4, 16, 4]
    attachment.remove()
    for module in (model, first, second, third, compiled, copy.deepcopy(first)):
        assert module(tokens()).shape[1] == 16
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs
        schedule.attach(module)
        assert module(tokens()).shape[1] == 4


def test_the_copy_of_a_model_that_is_compiled_in_place_loses_its_hook():
    model = compiled_in_place(Model())
    attachment = scheduler().attach(model)
    copied = copy.deepcopy(model)
    assert copied(tokens()).shape[1] == 4
    attachment.remove()
    assert copied(tokens()).shape[1] == 16
    assert not copied._forward_pre_hooks
    assert not copied._forward_pre_hooks_with_kwargs


def test_a_copied_model_with_a_schedule_of_its_own():
    model, schedule = Model(), scheduler()
    schedule.attach(model)
    other, others = copy.deepcopy((model, schedule))
    attachment = others.attach(other)
    others.step()
    assert other(tokens()).shape[1] == 8
    assert model(tokens()).shape[1] == 4
    attachment.remove()
    assert other(tokens()).shape[1] == 16
    assert model(tokens()).shape[1] == 4


def test_a_copy_has_no_buffers_of_the_original():
    model = Model()
    scheduler().attach(model, out=BatchBuffers({"input_ids": tokens()}, 16))
    model.forward = lambda input_ids: input_ids
    other = copy.deepcopy(model)
    kept = model(input_ids=(first := tokens()))
    other(input_ids=tokens())
    assert kept.equal(first[:, :4])


class LengthOfInput(nn.Module):
    def forward(self, input_ids):
        return input_ids.shape[1]


def test_a_copied_or_saved_model_has_no_frozen_schedule(tmp_path):
    model, scheduler = LengthOfInput(), SequenceLengthScheduler(8, 32, duration=3)
    attachment = scheduler.attach(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for length in (8, 16, 24, 32):
        assert model(BATCH["input_ids"]) == average(BATCH["input_ids"]) == length
        scheduler.step()
    scheduler.progress = 0
    with pytest.warns(UserWarning, match="the model was pickled while a SequenceLengthScheduler was attached"):
        assert loaded(BATCH["input_ids"]) == 32
    attachment.remove()
    assert model(BATCH["input_ids"]) == average(BATCH["input_ids"]) == 32


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_pickled_model_is_not_attached(tmp_path, fullgraph):
    model, schedule = Model(), scheduler()
    attachment = schedule.attach(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    again = pickle.loads(pickle.dumps(loaded))
    assert model(tokens()).shape[1] == 4
    assert attachment.take_seen() == (8, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model was pickled")
        assert loaded.eval()(tokens()).shape[1] == 16
        compiled = torch.compile(copy.deepcopy(loaded).train(), backend="aot_eager", fullgraph=fullgraph)
        assert compiled(tokens()).shape[1] == 16
    for other in (loaded.train(), again):
        with pytest.warns(UserWarning, match=r"its inputs are not resized. Call scheduler.attach\(model\)") as caught:
            assert other(tokens()).shape[1] == 16
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert other(tokens()).shape[1] == 16
        once_more = pickle.loads(pickle.dumps(other))  # after the warning
        with pytest.warns(UserWarning, match="the model was pickled"):
            once_more(tokens())
        attachment = schedule.attach(other)
        assert other(tokens()).shape[1] == 4
        attachment.remove()
        assert not other._forward_pre_hooks
        assert other(tokens()).shape[1] == 16


def test_a_pickled_attachment_can_be_removed():
    attachment = scheduler().attach(Model())
    pickle.loads(pickle.dumps(attachment)).remove()
