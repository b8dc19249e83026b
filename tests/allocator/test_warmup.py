"""The passes of warmup_allocator are those of the training to come: mode, loss, gradients, state, lengths."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import training_pass
from seqwarm_kernels.allocator.memory import DeviceMemory

from ..support.same import assert_same
from .models import Words
from .traces import everything


def ramp():
    """8, 16, 24, 32."""
    return SequenceLengthScheduler(8, 32, duration=100)


@pytest.mark.parametrize("name", ["a submodule fails", "compiled"])
def test_an_attached_scheduler_neither_resizes_nor_counts_the_passes(name):
    scheduler = SequenceLengthScheduler(8, 32, duration=30, unit="token")
    scheduler_before, words, fails = scheduler.state_dict(), Words(), name != "compiled"
    attachment = scheduler.attach(words)
    if fails:
        model = nn.Sequential(words)
    else:
        model = words
        model.compile(backend="eager")

    def loss_fn(output, batch):
        if fails and output.shape[1] == 16:
            raise RuntimeError("interrupted")
        return output.sum()

    example = torch.ones(1, 8).long()
    with pytest.raises(RuntimeError, match="interrupted") if fails else contextlib.nullcontext():
        warmup_allocator(model, 32, batch_size=2, loss_fn=loss_fn, scheduler=scheduler, example_batch=example)
    assert words.lengths == [32, 8, 16, 24, 32, 32][: 3 if fails else None]
    assert attachment.take_seen() == (0, 0)
    assert attachment.seq_length is None
    assert scheduler.state_dict() == scheduler_before
    model(torch.ones(2, 32).long())
    assert words.lengths[-1] == 8
    assert attachment.take_seen() == (16, 2)


def test_an_eval_model_is_trained_and_restored():
    model, seen = Words().eval(), []
    model.dropout.register_forward_hook(lambda module, *_: seen.append(module.training))
    warmup_allocator(model, 8)
    assert seen == [True]
    assert not any(module.training for module in model.modules())


def test_a_frozen_model_only_runs_forward():
    model = Words().requires_grad_(False)
    warmup_allocator(model, 8)
    assert model.lengths == [8]


def test_the_default_loss_is_that_of_the_output_or_the_mean_of_its_tensors():
    output = {"complex": torch.tensor([3 + 4j]), "others": [torch.tensor([-6.0, 4.0]), torch.tensor([7])]}
    assert training_pass._default_loss(output) == 5 - 1
    assert training_pass._default_loss({**output, "loss": torch.tensor(2.0)}) == 2
    assert training_pass._default_loss(SimpleNamespace(loss=torch.tensor(2.0), logits=torch.ones(3))) == 2


def test_autocast_dtype():
    model, seen = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    warmup_allocator(model, 8, autocast_dtype=torch.bfloat16)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [False]),
        ({"accumulation_steps": 2}, [False, True]),
        ({"accumulation_steps": 9}, [False, True]),
        ({"scheduler": ramp()}, [False] * 6),
    ],
)
@torch.no_grad()
def test_gradients_exist_during_forward_with_accumulation_alone(options, expected):
    model, exist = Words(), []
    model.dropout.register_forward_hook(lambda *_: exist.append(model.embedding.weight.grad is not None))
    warmup_allocator(model, 32, **options)
    assert exist == expected


@pytest.mark.parametrize("grad_scaler", [None, torch.amp.GradScaler("cpu", init_scale=1024.0)])
def test_gradients_are_unscaled_and_clipped_before_the_step(grad_scaler):
    model, norms = Words(), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: norms.append(model.embedding.weight.grad.norm()))
    options = {"grad_scaler": grad_scaler, "max_grad_norm": 0.5, "loss_fn": lambda output, _: output.square().sum()}
    warmup_allocator(model, 8, optimizer=optimizer, **options)
    torch.testing.assert_close(torch.stack(norms), torch.full((2,), 0.5), rtol=1e-4, atol=0)


def test_a_rehearsal_starts_without_the_state_that_the_passes_have_made():
    model, sizes = Words(), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, *_: sizes.append(len(optimizer.state)))
    warmup_allocator(model, 32, optimizer=optimizer, scheduler=ramp())
    assert model.lengths == [32, 32, 8, 16, 24, 32, 32]  # at first twice: without and with optimizer state
    assert sizes == [0, 1, 0, 1, 1, 1, 1]
    model(torch.ones(1, 2).long()).sum().backward()
    optimizer.step()
    sizes.clear()
    warmup_allocator(model, 32, optimizer=optimizer, scheduler=ramp())
    assert sizes == [1] * 7


def test_an_output_lives_until_the_next_forward_has_ended():
    model, outputs, living = Words(), [], []

    def keep(module, inputs, output):
        living.append([reference() is not None for reference in outputs])
        outputs.append(weakref.ref(output))

    model.register_forward_hook(keep)
    warmup_allocator(model, 32, scheduler=ramp())
    assert living == [[], [False], *([False] * count + [True] for count in (1, 2, 3, 4))]
    assert not any(reference() is not None for reference in outputs)


@pytest.mark.gpu
def test_on_a_gpu_short_lengths_allocate_nothing():
    model = Words().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = SequenceLengthScheduler(8, 512, duration=100)
    before, cuda_random = everything(model, optimizer), torch.cuda.get_rng_state()
    report = warmup_allocator(model, 512, batch_size=4, optimizer=optimizer, scheduler=scheduler)
    assert_same(before, everything(model, optimizer))
    assert torch.equal(cuda_random, torch.cuda.get_rng_state())
    assert report.device_allocations > 0
    assert report.last_allocations == 0
    memory = DeviceMemory(torch.device("cuda"))
    allocations = memory.allocations()
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]
    for length in [*lengths, *reversed(lengths)]:
        output = model(torch.randint(50, (4, length), device="cuda"))
        loss = output.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert memory.allocations() == allocations
