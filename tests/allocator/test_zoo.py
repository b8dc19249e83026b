"""warmup_allocator restores the state of a dozen models, with any options; training continues as without it."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from tests.allocator.traces import assert_same, everything, identities

from ..support.tiers import examples, first_fast

WORDS, WIDTH, MAX_LEN = 13, 8, 16


class Body(nn.Module):
    """An embedding, the modules under test, and a head."""

    def __init__(self, *inner):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Sequential(*inner)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        return self.head(self.inner(self.embedding(input_ids)))


class ChannelNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Buffers(nn.Module):
    """A counter, a buffer that is not saved, a buffer created in each call, and None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.register_buffer("made", torch.ones(x.shape[1]))
        return x


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def tied():
    model = Body(nn.Identity())
    model.head.weight = model.embedding.weight
    return model


def frozen():
    model = Body(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.GELU())
    model.embedding.requires_grad_(False)
    return model


def hooked():
    """Hooks that change activations and gradients, not the model."""
    model = Body(nn.Linear(WIDTH, WIDTH))
    model.inner.register_forward_hook(lambda module, inputs, output: output * 2)
    model.inner.register_full_backward_hook(lambda module, inputs, outputs: tuple(grad / 2 for grad in inputs))
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def compiled():
    model = Body(nn.Linear(WIDTH, WIDTH), nn.GELU())
    model.compile(backend="aot_eager")
    return model


def sharded():
    model = Body(nn.Linear(WIDTH, WIDTH), nn.GELU())
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ZOO = {
    "dropout": lambda: Body(nn.Dropout(0.5), nn.RReLU()),
    "batch norm": lambda: Body(ChannelNorm(WIDTH), nn.GELU()),
    "tied weights": tied,
    "frozen parts": frozen,
    "hooks": hooked,
    "buffers": lambda: Body(Buffers()),
    "complex": lambda: Body(Complex()),
    "mixed precision": lambda: Body(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "compiled": compiled,
    "checkpointed": lambda: Body(Checkpointed(), Checkpointed()),
    "DistributedDataParallel": lambda: DistributedDataParallel(Body(ChannelNorm(WIDTH), nn.Dropout(0.2))),
    "fully_shard": sharded,
}


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), batch["input_ids"].flatten())


def train(model, optimizer, steps):
    for _ in range(steps):
        batch = {"input_ids": torch.randint(WORDS, (2, 6))}
        optimizer.zero_grad()
        loss_fn(model(**batch), batch).backward()
        optimizer.step()


def make(name, has_state):
    torch.manual_seed(3)
    model = ZOO[name]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    if has_state:
        train(model, optimizer, 2)
    return model, optimizer


def draw_options(data):
    """Draw arguments of warmup_allocator."""
    options = {
        "accumulation_steps": data.draw(st.sampled_from([1, 4])),
        "batch_size": data.draw(st.sampled_from([1, 3])),
    }
    options["max_grad_norm"] = data.draw(st.sampled_from([None, 1.0]))
    if data.draw(st.booleans()):
        options["scheduler"] = SequenceLengthScheduler(4, MAX_LEN, duration=10, step_size=4)
        modes = [{}, {"mode": "reshape"}, {"mode": "reshape", "remainder": "pad"}]
        options["resize_options"] = data.draw(st.sampled_from(modes))
    if data.draw(st.booleans()):
        options["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=data.draw(st.sampled_from([2.0, 2.0**100])))
    if data.draw(st.booleans()):
        options["autocast_dtype"] = torch.bfloat16
    return options


zoo_examples = examples(5, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", ZOO)
@zoo_examples
@given(data=st.data())
def test_state_is_restored(name, data):
    model, optimizer = make(name, has_state=data.draw(st.booleans()))
    options = draw_options(data)
    if name == "complex":
        options.update(max_grad_norm=None, grad_scaler=None)  # torch's implementations take no complex gradients
    scaler = options.get("grad_scaler")
    before, before_ids = everything(model, optimizer), identities(model, optimizer)
    scaler_before = None if scaler is None else (scaler.state_dict(), scaler._scale, dict(scaler._per_optimizer_states))
    report = warmup_allocator(model, MAX_LEN, loss_fn=loss_fn, optimizer=optimizer, **options)
    assert_same(before, everything(model, optimizer))
    assert before_ids == identities(model, optimizer)
    if scaler is not None:
        assert scaler_before == (scaler.state_dict(), scaler._scale, dict(scaler._per_optimizer_states))
    assert report.out_of_memory is None
    assert report.lengths[0] == MAX_LEN


@pytest.mark.parametrize("name", ZOO)
def test_training_continues_as_without_the_call(name):
    results = []
    for warmed in (False, True):
        model, optimizer = make(name, has_state=True)
        if warmed:
            scheduler = SequenceLengthScheduler(4, MAX_LEN, duration=10, step_size=4)
            warmup_allocator(model, MAX_LEN, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler)
        train(model, optimizer, 3)
        results.append(everything(model, optimizer))
    assert_same(*results)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, error):
        ctx.error = error
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


def fails_at(model, optimizer, where, error):
    """Return handles of hooks that raise in forward, at the end of backward, or after the optimizer step."""

    def fail(*_):
        raise error

    inner = getattr(model, "module", model)
    if where == "forward":
        return [inner.head.register_forward_pre_hook(fail)]
    if where == "optimizer":
        return [optimizer.register_step_post_hook(fail)]
    # The last layer in backward, so that the backward of every other layer has started.
    first = inner.embedding if inner.embedding.weight.requires_grad else inner.head
    return [first.register_forward_hook(lambda module, inputs, output: Failing.apply(output, error))]


PLACES = pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
# Hooks would compile the compiled model again.
FAILING = [name for name in ZOO if name != "compiled"]


def after_a_failure(name, where, error, check):
    """Check that training continues as without the failure."""
    results = []
    for fails in (False, True):
        model, optimizer = make(name, has_state=True)
        if fails:
            before = everything(model, optimizer)
            handles = fails_at(model, optimizer, where, error)
            check(model, optimizer)
            for handle in handles:
                handle.remove()
            assert_same(before, everything(model, optimizer))
        train(model, optimizer, 3)
        results.append(everything(model, optimizer))
    assert_same(*results)


@PLACES
@pytest.mark.parametrize("name", FAILING)
def test_state_is_restored_after_an_error(name, where):
    def raises(model, optimizer):
        with pytest.raises(KeyError, match="a bug"):
            warmup_allocator(model, MAX_LEN, loss_fn=loss_fn, optimizer=optimizer)

    after_a_failure(name, where, KeyError("a bug"), raises)


@PLACES
@pytest.mark.parametrize("name", first_fast(FAILING))
def test_state_is_restored_after_running_out_of_memory(name, where):
    def reports(model, optimizer):
        report = warmup_allocator(
            model, MAX_LEN, batch_size=4, loss_fn=loss_fn, optimizer=optimizer, find_batch_size=True
        )
        assert report.out_of_memory.largest_batch_size == 0

    after_a_failure(name, where, torch.OutOfMemoryError("CUDA out of memory."), reports)


def test_after_an_evaluation():
    """fully_shard leaves parameters unsharded after a forward without a backward."""
    for name in ("fully_shard", "DistributedDataParallel"):
        model, optimizer = make(name, has_state=True)
        with torch.no_grad():
            model.eval()(torch.randint(WORDS, (2, 6)))
        model.train()
        warmup_allocator(model, MAX_LEN, loss_fn=loss_fn, optimizer=optimizer)
        train(model, optimizer, 2)


@pytest.mark.parametrize("mark", ["ds_id", "param_idx_in_group"])
def test_parameters_of_zero_are_refused(mark):
    """tests/trainers/test_deepspeed.py has the real ones."""
    model = Body(nn.Linear(WIDTH, WIDTH))
    setattr(next(model.parameters()), mark, 0)
    with pytest.raises(ValueError, match=r"model must not be DeepSpeed's yet, got Body: .* before deepspeed\.init"):
        warmup_allocator(model, 6, loss_fn=loss_fn)


def test_a_static_graph_is_refused():
    """It failed in an assertion of torch."""
    model = Body(nn.Linear(WIDTH, WIDTH))
    wrapper = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="model must not be a DistributedDataParallel with static_graph=True"):
        warmup_allocator(wrapper, 6, loss_fn=loss_fn)
