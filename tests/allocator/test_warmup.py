"""warmup_allocator restores all state bit for bit, also if the model or the optimizer fails."""

import random

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from tests.allocator.traces import assert_same, everything, identities


class Tied(nn.Module):
    """Embedding first, dropout, batch norm buffers, tied weights, a frozen part, a buffer created in forward."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("overlapping", torch.ones(1).expand(3))
        self.fail_at = fail_at
        self.lengths = []

    def forward(self, input_ids):
        self.calls += 1
        self.lengths.append(input_ids.shape[1])
        self.register_buffer("cache", torch.zeros(input_ids.shape[1]))
        hidden = self.batch_norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        if self.fail_at is not None and len(self.lengths) >= self.fail_at:
            raise RuntimeError("interrupted")
        random.random()
        numpy.random.rand()
        return self.head(self.dropout(self.frozen(hidden)))


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
    assert model.lengths == [32, 32, 24, 16, 8]  # twice at full length: without and with optimizer state


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


class Recorder(nn.Module):
    """Records its inputs; `forward` takes a batch in one of several ways."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = []
        self.forward = forward.__get__(self)


def by_name(self, input_ids, attention_mask=None):
    self.calls.append((input_ids, attention_mask))
    return input_ids * self.weight


def by_keywords(self, **batch):
    self.calls.append(batch)
    return batch["input_ids"] * self.weight


def whole(self, batch):
    self.calls.append(batch)
    return {"loss": (batch["input_ids"] * self.weight).mean()}


def positional(self, inputs):
    self.calls.append(inputs)
    return inputs * self.weight


def example():
    return {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "labels": torch.tensor([[4, 5, -100]]),
        "weight": torch.tensor([0.5]),
        "pair_mask": torch.zeros(1, 1, 3, 3, dtype=torch.bool),
    }


def test_a_mapping_is_passed_by_the_names_of_forward():
    model = Recorder(by_name)
    batches = []

    def loss_fn(output, batch):
        batches.append(batch)
        return output.mean()

    report = warmup_allocator(model, 7, batch_size=2, example_batch=example(), loss_fn=loss_fn)
    ((input_ids, attention_mask),) = model.calls
    assert input_ids.tolist() == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert attention_mask.tolist() == [[1] * 7] * 2
    assert batches[0]["labels"].tolist() == [[4, 5, -100, 4, 5, -100, 4]] * 2
    assert batches[0]["weight"].tolist() == [0.5, 0.5]
    assert batches[0]["pair_mask"].shape == (2, 1, 7, 7)
    assert batches[0]["pair_mask"].all()
    assert report.batch_size == 2


@pytest.mark.parametrize("forward", [by_keywords, whole])
def test_a_mapping_is_passed_whole(forward):
    model = Recorder(forward)
    warmup_allocator(model, 5, example_batch=example())
    assert list(model.calls[0]) == list(example())
    assert model.calls[0]["input_ids"].shape == (1, 5)


class Named(nn.Embedding):
    """An embedding whose forward has parameters of other names."""

    def forward(self, idx, targets=None):
        return super().forward(idx)


class NamedWithOptions(nn.Embedding):
    def forward(self, idx, **options):
        return super().forward(idx)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Named(8, 4), r"must be parameters of Named.forward\(idx, targets=None\), got .* so idx would be missing"),
        (NamedWithOptions(8, 4), r"of NamedWithOptions.forward\(idx, \*\*options\), got .* so idx would be missing"),
        (nn.Sequential(nn.Embedding(8, 4)), r"of Sequential.forward\(input\), .* must be Tensor, not dict"),
    ],
    ids=["two", "options", "one"],
)
def test_names_that_do_not_fit_the_parameters(model, problem):
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(TypeError, match=problem) as caught:
        warmup_allocator(model, 8, example_batch=batch)
    assert "got input_ids, labels" in str(caught.value)
    assert "Rename the entries, or pass a tensor or a tuple of tensors instead" in str(caught.value)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: (t, t), lambda t: [t, t]])
def test_tensors_are_passed_by_position(make):
    model = Recorder(positional)
    scheduler = SequenceLengthScheduler(2, 6, duration=10, step_size=2)
    warmup_allocator(model, 6, example_batch=make(torch.arange(6).view(2, 3)), scheduler=scheduler)
    assert [tuple(call.shape) for call in model.calls] == [(2, 6), (2, 4), (2, 2)]


@pytest.mark.parametrize("value", [3, 1.5, None, "words", [1, None]], ids=repr)
def test_nested_entries_that_are_not_tensors_are_passed_unchanged(value):
    seen = []

    def forward(self, ids, task):
        seen.append((ids.shape, task))
        return self.weight * ids.float()

    task = {"value": value, "list": [value, 2], "inner": {"value": value, "mask": torch.ones(1, 3)}}
    warmup_allocator(Recorder(forward), 8, batch_size=2, example_batch={"ids": torch.ones(1, 3), "task": task})
    (shape, found), *_ = seen
    assert shape == found["inner"]["mask"].shape == (2, 8)
    assert (found["value"], found["list"], found["inner"]["value"]) == (value, [value, 2], value)
    assert task["inner"]["mask"].shape == (1, 3)


def test_resize_options_are_applied():
    model = Recorder(by_name)
    scheduler = SequenceLengthScheduler(4, 8, duration=10, step_size=4)
    batch = {"input_ids": torch.ones(2, 8), "pixel_values": torch.ones(2, 3, 4, 4)}
    options = {"mode": "reshape", "keys": ["input_ids"]}
    warmup_allocator(model, 8, example_batch=batch, scheduler=scheduler, resize_options=options)
    assert [tuple(input_ids.shape) for input_ids, _ in model.calls] == [(2, 8), (4, 4)]


@pytest.mark.parametrize(("accumulation_steps", "passes"), [(1, 1), (2, 2), (9, 2)])
def test_with_accumulation_gradients_exist_during_forward(accumulation_steps, passes):
    model = Tied()
    exist = []
    model.dropout.register_forward_hook(lambda *_: exist.append(model.embedding.weight.grad is not None))
    warmup_allocator(model, 8, accumulation_steps=accumulation_steps)
    assert exist == [False, True][:passes]


def test_tokens_may_come_first():
    model = Recorder(by_name)
    scheduler = SequenceLengthScheduler(8, 64, duration=10, step_size=56)
    options = {"seq_dim": 0}
    batch = {"class_weights": torch.ones(10), "scale": torch.tensor(1.0), "input_ids": torch.zeros(16, 4)}
    report = warmup_allocator(model, 64, batch_size=2, example_batch=batch, scheduler=scheduler, resize_options=options)
    assert [tuple(input_ids.shape) for input_ids, _ in model.calls] == [(64, 2), (8, 2)]
    assert report.batch_size == 2


def test_rows_are_counted_by_the_tokens():
    batch = {"class_weights": torch.ones(10), "scale": torch.tensor(1.0), "input_ids": torch.zeros(2, 4)}
    assert warmup_allocator(Recorder(by_name), 8, example_batch=batch).batch_size == 2


class OwnState(torch.optim.SGD):
    """Keeps a list of tensors, and replaces the dict of its state at each step."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            old = self.state[parameter]
            kept = old.get("kept", [torch.zeros(2)])
            kept[0].add_(1)
            self.state[parameter] = {"kept": kept, "steps": old.get("steps", 0) + 1}


def test_state_in_lists_and_in_new_dicts():
    model = Tied()
    optimizer = OwnState(model.parameters(), lr=0.1)
    trained(model, optimizer)
    before = everything(model, optimizer)
    warmup_allocator(model, 8, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))


class Config:
    vocab_size = 30


class HuggingFaceLike(nn.Module):
    """Has everything that is read from a transformers model: config, names of forward, output embeddings, loss."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.project = nn.Linear(1, 30)
        self.seen = []

    def get_output_embeddings(self):
        return self.project

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        self.seen.append((input_ids, attention_mask, labels))
        logits = self.project(input_ids[..., None].float())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_hugging_face_model_without_an_example():
    model = HuggingFaceLike()
    warmup_allocator(model, 12, batch_size=3)
    ((input_ids, attention_mask, labels),) = model.seen
    assert input_ids.shape == (3, 12)
    assert input_ids.min() >= 0
    assert input_ids.max() < 30
    assert attention_mask.all()
    assert labels.equal(input_ids)


def test_report():
    scheduler = SequenceLengthScheduler(8, 32, duration=100)
    report = warmup_allocator(Tied(), 64, batch_size=2, scheduler=scheduler)
    assert report.lengths == (64, 32, 24, 16, 8)
    assert report.device == "cpu"
    assert report.reserved_bytes is None
    assert report.device_allocations is None
    assert report.peak_bytes > 0
    lines = str(report).splitlines()
    assert lines[0] == "warmup_allocator"
    assert "64, then 4 from 32 to 8" in str(report)
    assert "reserved memory" not in str(report)
    assert any("peak memory" in line and "of the whole process, with Python and torch" in line for line in lines)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.Embedding(3, 3))]
)
def test_inputs_that_cannot_be_guessed(make):
    model = make()
    before = everything(model)
    with pytest.raises(ValueError, match=r"cannot guess the inputs of .*; pass example_batch"):
        warmup_allocator(model, 8)
    assert_same(before, everything(model))


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
    ({"model": None}, TypeError, "model must be a torch.nn.Module, got NoneType"),
    ({"batch_size": "big"}, ValueError, "batch_size must be an int or 'auto', got 'big'"),
    ({"batch_size": b"x"}, TypeError, "batch_size must be an int, got bytes"),
    ({"batch_size": True}, TypeError, "batch_size must be an int, got bool"),
    ({"scheduler": b"x"}, TypeError, "scheduler must be a SequenceLengthScheduler or None, got bytes"),
    ({"optimizer": b"x"}, TypeError, "optimizer must be a torch optimizer or None, got bytes"),
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


def test_a_model_without_a_float_output():
    with pytest.raises(
        ValueError, match="loss_fn is needed: the output of the model must hold a floating-point tensor, got str"
    ):
        warmup_allocator(Recorder(lambda self, x: "done"), 8, example_batch=torch.ones(1, 2))


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
    again = warmup_allocator(model, 512, batch_size=4, optimizer=optimizer, scheduler=scheduler)
    assert again.device_allocations == 0
