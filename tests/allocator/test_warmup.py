"""warmup_allocator restores all state bit for bit, also if the model or the optimizer fails."""

import contextlib
import random
import weakref
from collections import UserList
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import training_pass
from seqwarm_kernels.allocator.memory import DeviceMemory

from .models import Tied
from .traces import assert_same, everything, identities


def trained(model, optimizer):
    """Run two training steps. Gradients of the second step are kept."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(50, (2, 5))).square().mean().backward()
        optimizer.step()
    model.lengths.clear()


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused AdamW with a tensor rate": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.1), fused=True
    ),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_restored(name, has_state):
    model = Tied()
    model.dropout.eval()
    optimizer = OPTIMIZERS[name](model.parameters())
    if has_state:
        trained(model, optimizer)
    scheduler = SequenceLengthScheduler(8, 32, duration=100)
    scheduler.step(30)
    before, before_ids, schedule_before = (
        everything(model, optimizer),
        identities(model, optimizer),
        scheduler.state_dict(),
    )
    warmup_allocator(model, 32, batch_size=3, optimizer=optimizer, scheduler=scheduler)
    assert_same(before, everything(model, optimizer))
    assert before_ids == identities(model, optimizer)
    assert model.head.weight is model.embedding.weight
    assert scheduler.state_dict() == schedule_before
    assert model.lengths == [32, 32, 8, 16, 24, 32]  # twice at full length: without and with optimizer state


class Recorded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lengths = nn.Embedding(4, 2), UserList()

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return self.embedding(input_ids)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return self.inner(input_ids)


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


#: Attaches to a model, and returns the model to warm up. `attach` returns the model that it is called with.
ATTACHED = {
    "model": lambda model, attach: attach(model),
    "submodule": lambda model, attach: Outer(attach(model)),
    "compiled": lambda model, attach: attach(torch.compile(model, backend="eager")),
    "compiled in place": lambda model, attach: attach(compiled_in_place(model)),
    "compiled in place later": lambda model, attach: compiled_in_place(attach(model)),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ATTACHED)
def test_an_attached_scheduler_neither_resizes_nor_counts_the_passes(name, fails):
    scheduler = SequenceLengthScheduler(8, 32, duration=30, unit="token")

    def attach(module):
        scheduler.attach(module)
        return module

    def loss_fn(output, batch):
        if fails and output.shape[1] == 16:
            raise RuntimeError("interrupted")
        return output.sum()

    model = ATTACHED[name](Recorded(), attach)
    lengths = next(module.lengths for module in model.modules() if isinstance(module, Recorded))
    (attachment,) = [attachment for m in model.modules() if (attachment := vars(m).get("_seqwarm_attachment"))]
    arguments = {"batch_size": 2, "scheduler": scheduler, "example_batch": {"input_ids": torch.ones(1, 8).long()}}
    with pytest.raises(RuntimeError, match="interrupted") if fails else contextlib.nullcontext():
        warmup_allocator(model, 32, loss_fn=loss_fn, **arguments)
    assert lengths == [32, 8, 16, 24, 32][: 3 if fails else None]
    assert attachment.take_seen() == (0, 0)
    assert attachment.seq_length is None
    model(torch.ones(2, 32).long())
    assert lengths[-1] == 8
    assert attachment.take_seen() == (16, 2)
    assert scheduler.progress == 0


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_state_is_restored_when_the_model_raises(fail_at):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    model.fail_at = fail_at
    before, before_ids = everything(model, optimizer), identities(model, optimizer)
    with pytest.raises(RuntimeError, match="interrupted"):
        warmup_allocator(model, 32, optimizer=optimizer, scheduler=SequenceLengthScheduler(8, 32, duration=100))
    assert_same(before, everything(model, optimizer))
    assert before_ids == identities(model, optimizer)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("in backward")


def failing_loss(output, batch):
    return FailingBackward.apply(output).sum()


class FailingOptimizer(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        raise RuntimeError("in the optimizer")


@pytest.mark.parametrize(
    ("optimizer_class", "loss_fn", "message"),
    [(torch.optim.AdamW, failing_loss, "in backward"), (FailingOptimizer, None, "in the optimizer")],
)
def test_state_is_restored_when_backward_or_the_optimizer_raises(optimizer_class, loss_fn, message):
    model = Tied()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        warmup_allocator(model, 16, optimizer=optimizer, loss_fn=loss_fn)
    assert_same(before, everything(model, optimizer))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_continues_as_without_the_call():
    def train(with_warmup):
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trained(model, optimizer)
        if with_warmup:
            warmup_allocator(model, 64, batch_size=2, optimizer=optimizer)
        trained(model, optimizer)
        rate.step()
        return everything(model, optimizer)

    assert_same(train(False), train(True))


def test_an_eval_model_is_trained_and_restored():
    model = Tied().eval()
    seen = []
    model.dropout.register_forward_hook(lambda module, *_: seen.append(module.training))
    warmup_allocator(model, 8)
    assert seen == [True]
    assert not any(module.training for module in model.modules())


def test_the_default_loss_is_that_of_the_output_or_the_mean_of_its_tensors():
    output = {"complex": torch.tensor([3 + 4j]), "others": [torch.tensor([-6.0, 4.0]), torch.tensor([7])]}
    assert training_pass._default_loss(output) == 5 - 1
    assert training_pass._default_loss({**output, "loss": torch.tensor(2.0)}) == 2
    assert training_pass._default_loss(SimpleNamespace(loss=torch.tensor(2.0), logits=torch.ones(3))) == 2


def test_a_frozen_model_only_runs_forward():
    model = Tied().requires_grad_(False)
    warmup_allocator(model, 8)
    assert model.lengths == [8]


def test_autocast_dtype():
    seen = []

    class Linear(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    warmup_allocator(nn.Sequential(nn.Embedding(9, 4), Linear(4, 4)), 8, autocast_dtype=torch.bfloat16)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(("accumulation_steps", "passes"), [(1, 1), (2, 2), (9, 2)])
def test_with_accumulation_gradients_exist_during_forward(accumulation_steps, passes):
    model = Tied()
    exist = []
    model.dropout.register_forward_hook(lambda *_: exist.append(model.embedding.weight.grad is not None))
    warmup_allocator(model, 8, accumulation_steps=accumulation_steps)
    assert exist == [False, True][:passes]


def test_gradients_of_a_step_are_gone_at_the_next_forward():
    model, exist = Tied(), []
    model.dropout.register_forward_hook(lambda *_: exist.append(model.embedding.weight.grad is not None))
    with torch.no_grad():
        warmup_allocator(model, 32, scheduler=SequenceLengthScheduler(8, 32, duration=100))
    assert exist == [False] * 5


@pytest.mark.parametrize("grad_scaler", [None, torch.amp.GradScaler("cpu", init_scale=1024.0)])
def test_gradients_are_unscaled_and_clipped_before_the_step(grad_scaler):
    model, norms = Tied(), []
    optimizer = torch.optim.AdamW(model.parameters())

    def record(*_):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())

    def loss_fn(output, batch):
        return output.square().sum()

    optimizer.register_step_pre_hook(record)
    warmup_allocator(model, 8, loss_fn=loss_fn, optimizer=optimizer, grad_scaler=grad_scaler, max_grad_norm=0.5)
    torch.testing.assert_close(torch.stack(norms), torch.full((2,), 0.5), rtol=1e-4, atol=0)


def test_a_rehearsal_starts_without_the_state_that_the_passes_have_made():
    model, sizes = Tied(), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, *_: sizes.append(len(optimizer.state)))
    scheduler = SequenceLengthScheduler(8, 32, duration=100)
    warmup_allocator(model, 32, optimizer=optimizer, scheduler=scheduler)
    with_state = sizes[1]
    assert with_state > 0
    assert sizes == [0, with_state, 0, *[with_state] * 3]
    sizes.clear()
    trained(model, optimizer)
    sizes.clear()
    warmup_allocator(model, 32, optimizer=optimizer, scheduler=scheduler)
    assert sizes == [with_state] * 6


def test_an_output_lives_until_the_next_forward_has_ended():
    model, outputs, living = Tied(), [], []

    def keep(module, inputs, output):
        living.append([reference() is not None for reference in outputs])
        outputs.append(weakref.ref(output))

    model.register_forward_hook(keep)
    warmup_allocator(model, 32, scheduler=SequenceLengthScheduler(8, 32, duration=100))
    assert living == [[], [False], [False, True], [False, False, True], [False, False, False, True]]
    assert not any(reference() is not None for reference in outputs)


class OwnState(torch.optim.SGD):
    """Keeps a list of tensors and others, and replaces the dict of its state at each step."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            old = self.state[parameter]
            kept = old.get("kept", [torch.zeros(2), "a name"])
            kept[0].add_(1)
            self.state[parameter] = {"kept": kept, "steps": old.get("steps", 0) + 1}


def test_state_in_lists_and_in_new_dicts():
    model = Tied()
    optimizer = OwnState(model.parameters(), lr=0.1)
    trained(model, optimizer)
    before = everything(model, optimizer)
    kept = [state["kept"][0] for state in optimizer.state.values()]
    warmup_allocator(model, 8, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))
    assert all(state["kept"][0] is tensor for state, tensor in zip(optimizer.state.values(), kept, strict=True))


def test_report(capsys):
    scheduler = SequenceLengthScheduler(8, 32, duration=100)
    report = warmup_allocator(Tied(), 64, batch_size=2, scheduler=scheduler)
    assert report.lengths == (64, 8, 16, 24, 32)
    assert report.device == "cpu"
    assert report.reserved_bytes is None
    assert report.device_allocations is None
    assert report.peak_bytes > 0
    lines = str(report).splitlines()
    assert lines[0] == "warmup_allocator"
    assert not capsys.readouterr().err, "a bar belongs on a terminal"
    assert "64, then 4 from 8 to 32" in str(report)
    assert "reserved memory" not in str(report)
    assert any("peak memory" in line and "of the whole process, with Python and torch" in line for line in lines)


@pytest.mark.gpu
def test_on_a_gpu_short_lengths_allocate_nothing():
    model = Tied().cuda()
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
