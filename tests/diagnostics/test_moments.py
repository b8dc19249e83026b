"""moment_statistics: what every optimizer has, in each layout."""

import json
import types

import pytest
import torch

from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor, moment_statistics
from seqwarm_kernels.diagnostics import moments as moments_module
from seqwarm_kernels.diagnostics.moments import gradient_norm

from .plain import model_of, train_step
from .plain import statistics as plain
from .plain import statistics_of as plain_of


def values(found):
    return [None if value is None else value.item() for value in found]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_every_adam_on_the_device(options):
    model = model_of().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train_step(model, optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = moment_statistics(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.variance_l1.is_cuda
    assert values(found) == pytest.approx(plain_of(optimizer), rel=1e-6)


def test_groups_frozen_parameters_and_parameters_without_a_gradient():
    model = model_of()
    model[0].requires_grad_(False)
    unused = torch.nn.Parameter(torch.ones(9))
    groups = [{"params": [*model[0].parameters(), unused]}, {"params": model[1:].parameters(), "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups)
    train_step(model, optimizer)
    assert values(moment_statistics(optimizer)) == pytest.approx(plain_of(optimizer), rel=1e-6)


def test_what_is_not_there_is_none():
    assert values(moment_statistics(torch.optim.Adam([{"params": []}]))) == [None] * 5
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    assert values(moment_statistics(optimizer)) == [None] * 5
    model(torch.ones(1, 5)).sum().backward()  # and a scaler may skip the first step
    *moments, norm = moment_statistics(optimizer)
    assert moments == [None] * 4
    assert norm.item() == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    assert gradient_norm(optimizer).equal(norm)
    train_step(model, optimizer)
    optimizer.zero_grad()
    assert moment_statistics(optimizer).grad_norm is gradient_norm(optimizer) is None
    assert moment_statistics(optimizer).variance_l1 > 0


def test_sparse_gradients_count_each_element_once():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    embedding(torch.tensor([3, 5, 3])).square().sum().backward()
    optimizer.step()
    dense = embedding.weight.grad.to_dense()
    state = optimizer.state[embedding.weight]
    expected = plain([state["exp_avg"]], [state["exp_avg_sq"]], [dense])
    assert values(moment_statistics(optimizer)) == pytest.approx(expected, rel=1e-6)


def test_wrapped_optimizers():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    wrapped = types.SimpleNamespace(optimizer=types.SimpleNamespace(optimizer=optimizer))
    with pytest.raises(TypeError, match="must have param_groups and state, got SimpleNamespace"):
        moment_statistics(wrapped)
    for layer in (wrapped.optimizer, wrapped):
        layer.param_groups, layer.state = [], {}
    assert values(moment_statistics(wrapped)) == pytest.approx(plain_of(optimizer), rel=1e-6)


#: What an optimizer has of the five statistics: variance, variance, momentum, momentum, gradients.
VARIANCE, MOMENTUM, BOTH, NEITHER = [1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]
OPTIMIZERS = {
    "Adam": (lambda p: torch.optim.Adam(p), BOTH),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), BOTH),
    "NAdam": (lambda p: torch.optim.NAdam(p), BOTH),
    "RAdam": (lambda p: torch.optim.RAdam(p), BOTH),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), NEITHER),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), MOMENTUM),
    "RMSprop": (lambda p: torch.optim.RMSprop(p), VARIANCE),
    "RMSprop with momentum": (lambda p: torch.optim.RMSprop(p, momentum=0.9), BOTH),
    "Adamax": (lambda p: torch.optim.Adamax(p), MOMENTUM),
    "Adafactor": (lambda p: torch.optim.Adafactor(p), NEITHER),
    "Muon": (lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]), MOMENTUM),
}


def assert_close(found, expected):
    pairs = zip(found, expected, strict=True)
    assert all(a is b if b is None else a == pytest.approx(b, rel=1e-6) for a, b in pairs)


@pytest.mark.parametrize(("make", "has"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_against_plain_numbers(make, has, tmp_path):
    """It is watched for what it keeps."""
    model, records, path, expected, losses = model_of(), [], tmp_path / "monitor.jsonl", [], []
    optimizer = make(model.parameters())
    with TrainingMonitor(optimizer, records.append, JsonLines(path), read_every=2) as monitor:
        for _ in range(4):
            losses.append(train_step(model, optimizer))
            expected.append(plain_of(optimizer))
            assert_close(values(moment_statistics(optimizer)), expected[-1])
            monitor.observe(losses[-1], rate=0.5)
    names = ("variance_l1", "variance_max", "momentum_l1", "momentum_max", "grad_norm")
    for record, numbers, line in zip(records, expected, path.read_text().splitlines(), strict=True):
        found = [getattr(record, name) for name in names]
        assert_close(found, numbers)
        assert [json.loads(line)[name] for name in names] == found
        assert [value is not None for value in found] == [bool(each) for each in has]
        assert record.extra == {"rate": 0.5}
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert [record.loss for record in records] == losses


def test_statistics_are_over_the_parameters_that_have_a_moment():
    """As of one optimizer that steps matrices as Muon does, and all else as Adam does."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    for parameter in (model[0].weight, model[2].weight):
        optimizer.state[parameter] = {"momentum_buffer": torch.randn_like(parameter)}
    expected = plain_of(optimizer)
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [unused]})
    optimizer.state[unused] = {"momentum_buffer": None}  # as SGD's state may have
    assert values(moment_statistics(optimizer)) == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_that_holds_one_ranks_part_is_refused():
    optimizer = torch.optim.AdamW(model_of().parameters())
    zero = types.SimpleNamespace(param_groups=[], state={}, optim=optimizer)
    with pytest.raises(ValueError, match=r"holds this rank's part in \.optim"):
        moment_statistics(zero)
    for call in (moment_statistics, TrainingMonitor):
        with pytest.raises(TypeError, match="optimizer"):
            call(model_of())
    with pytest.raises(ValueError, match="backend"):
        moment_statistics(optimizer, backend="best")


class Quantized(torch.Tensor):
    """Like torchao's OptimState8bit, which has numbers for those who ask."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, device=numbers.device)

    def __init__(self, numbers):
        self.numbers = numbers

    def dequantize(self, output_dtype=None):
        return self.numbers

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        raise AssertionError(f"{func} on a quantized tensor")


def test_torchaos_layout():
    parameter = torch.nn.Parameter(torch.zeros(8, 32))
    optimizer = torch.optim.AdamW([parameter])
    moments = torch.randn(8, 32), torch.rand(8, 32)
    optimizer.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), map(Quantized, moments), strict=True))
    expected = plain(*[[moment] for moment in moments], [])
    assert values(moment_statistics(optimizer))[:4] == pytest.approx(expected[:4], rel=1e-6)


def bitsandbytes_state(shape, block):
    """A state of bitsandbytes, and the numbers that it represents: codes, and the largest value of each block."""
    state, represented = {"step": 1}, []
    for which, qmap in ((1, torch.linspace(-1, 1, 256)), (2, torch.linspace(0, 1, 256))):
        codes = torch.randint(256, shape, dtype=torch.uint8)
        largest = torch.rand(-(-codes.numel() // block))
        state |= {f"state{which}": codes, f"qmap{which}": qmap, f"absmax{which}": largest}
        by_block = zip(qmap[codes.flatten().int()].split(block), largest, strict=True)
        represented.append(torch.cat([numbers * scale for numbers, scale in by_block]))
    return state, represented


@pytest.mark.parametrize("at_once", [2**25, 100])
@pytest.mark.parametrize("block", [128, 256])
def test_bitsandbytes_layout(monkeypatch, block, at_once):
    monkeypatch.setattr(moments_module, "_MAX_COPIED_ELEMENTS", at_once)
    shapes = [(4, 256), (3, 111), (9,), (257,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    small = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([*parameters, small])
    expected = [[], []]
    for parameter in parameters:
        optimizer.state[parameter], represented = bitsandbytes_state(parameter.shape, block)
        for moments, moment in zip(expected, represented, strict=True):
            moments.append(moment)
    optimizer.state[small] = {"state1": torch.randn(5), "state2": torch.rand(5)}
    for moments, which in zip(expected, ("state1", "state2"), strict=True):
        moments.append(optimizer.state[small][which])
    assert values(moment_statistics(optimizer))[:4] == pytest.approx(plain(*expected, [])[:4], rel=1e-6)
    tensors = moments_module.optimizer_tensors(optimizer, with_moments=True, with_gradients=True)
    assert len(list(moments_module._batches(tensors))) == (1 if at_once == 2**25 else 7)


def test_bitsandbytes_with_one_moment_is_left_out():
    """It is momentum in Lion, and a second moment in RMSprop."""
    parameter = torch.nn.Parameter(torch.zeros(300))
    optimizer = torch.optim.AdamW([parameter])
    state, _ = bitsandbytes_state((300,), 256)
    optimizer.state[parameter] = {name: value for name, value in state.items() if not name.endswith("2")}
    assert values(moment_statistics(optimizer)) == [None] * 5


def test_parts_are_combined_without_waiting_for_the_device():
    """An index that is a list becomes a tensor, which is copied to the device."""
    rows = torch.tensor([[1.0, 2, 3, 4, 5], [5, 1, 5, 1, 5]])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        combined = moments_module._combined(rows)
    assert combined.tolist() == [6, 2, 8, 4, 10]
    assert not {event.name for event in profile.events()} & {"aten::index", "aten::index_put_", "aten::copy_"}
