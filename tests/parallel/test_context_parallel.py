"""Models whose rows are sharded over two ranks train as on one."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch, warmup_allocator
from seqwarm_kernels.parallel import ContextBatches, ContextParallel, shard_sequence, sharded_by

from ..support.exchanges import Exchanges
from ..support.ranks import run_on_mesh
from ..support.tiers import first_fast

pytest.importorskip("transformers")

from ..models.zoo import FAMILIES, OTHERS, make, padding, tokens
from ..trainers.shards import watch

ROWS, LENGTH, STEPS = 2, 24, 3
CAUSAL = ["llama", *(name for name, family in (FAMILIES | OTHERS).items() if family.causal and name != "llama")]


def causal_batch(step):
    """Even steps have padding, of row 1 only: rank 0 does not see it where it is on the right."""
    torch.manual_seed(step)
    input_ids = tokens(ROWS, LENGTH)
    mask = padding(("right", "left", "none")[step % 3], ROWS, LENGTH)
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    return batch if mask is None else batch | {"attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def packed_batch(step):
    torch.manual_seed(step)
    input_ids = tokens(1, 2 * LENGTH - 5)
    lengths = [[20, 3, 20], [21, 22], [1, 30, 12]][step]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = input_ids.masked_fill(position_ids == 0, -100)  # as DataCollatorWithFlattening
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "use_cache": False}


def masked_batch(step):
    torch.manual_seed(step)
    batch = causal_batch(step)
    is_counted = torch.rand(ROWS, LENGTH) < torch.linspace(0.1, 0.9, LENGTH)  # most of them on rank 1
    return batch | {"labels": batch["labels"].masked_fill(~is_counted, -100)}


def converted(name):
    """In float64, so that only what is left out differs. The reference backend serves it."""
    model = make(name, torch.float64)
    apply_alibi(model, 128, learn_slopes=name == "llama")
    return model.train()


def pair(mesh, name, halo=None):
    """A model, and a copy whose rows the ranks share."""
    whole = converted(name)
    return whole, parallelize_module(copy.deepcopy(whole), mesh, ContextParallel(halo))


def loss_of(model, batch, name):
    """The mean over all labels. Masked language models compute a mean of their own, which is that of a rank."""
    if (FAMILIES | OTHERS)[name].causal:
        return model(**batch).loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    num_items = inputs.pop("num_items_in_batch", (batch["labels"] != -100).sum())
    logits = model(**inputs).logits
    return (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / num_items
    )


def flat_gradient(model, batch):
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def trained(name, model, batches, *, is_sharded=False):
    """The losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch, name)
        loss.backward()
        loss = loss.detach()
        if is_sharded:
            for tensor in [loss, *(p.grad for p in model.parameters() if p.grad is not None)]:
                torch.distributed.all_reduce(tensor)
                tensor /= 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trains_as_one(mesh, name, make_batch=causal_batch, *, shift=True, halo=None, wrap=lambda model: model):
    whole, sharded = pair(mesh, name, halo)
    batches = [make_batch(step) for step in range(STEPS)]
    parts = [shard_sequence(batch, mesh, shift_labels=shift) for batch in batches]
    if not shift:
        for batch, part in zip(batches, parts, strict=True):
            part["num_items_in_batch"] = (batch["labels"] != -100).sum() / mesh.size()
    expected = trained(name, whole, batches)
    assert trained(name, wrap(sharded), parts, is_sharded=True) == pytest.approx(expected, rel=1e-6)
    for (parameter, one), two in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-4, msg=lambda text, at=parameter: f"{at}: {text}")


def ramp_batch(step):
    """24 rows of 2 tokens, 3 rows of 16, and one row of several sequences."""
    if step == 2:
        return packed_batch(step)
    return resize_batch(causal_batch(step), (2, 16)[step], mode="flatten")


def check_batches(mesh):
    """Whole rows, tokens, and packed sequences, one after another."""
    whole, sharded = pair(mesh, "llama")
    forward, counts, batches = sharded.forward, [], [ramp_batch(step) for step in range(STEPS)]

    def counted(**batch):
        with Exchanges() as exchanges:
            outputs = forward(**batch)
        counts.append(exchanges.count)
        return outputs

    sharded.forward = counted
    shard = ContextBatches(sharded)
    losses = trained("llama", sharded, map(shard, batches), is_sharded=True)
    assert losses == pytest.approx(trained("llama", whole, batches), rel=1e-6)
    assert [count > 0 for count in counts] == [False, True, True]
    for step in (0, 1):  # evaluation in between, of whole rows and of tokens
        sharded(**shard(batches[step]))
        sharded.eval()
        rows, counts[:] = tokens(1, 8), []
        sharded(input_ids=rows)
        sharded(input_ids=rows, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)
        with sharded_by(sharded, "rows"):
            with sharded_by(sharded, "tokens"):
                sharded(input_ids=rows)
            sharded(input_ids=rows)
        sharded(input_ids=rows, context_part="tokens")
        assert [count > 0 for count in counts] == [False, False, True, False, True]
        with pytest.raises(ValueError, match="inputs"):
            sharded.train()(input_ids=rows)  # neither from its last training batch, nor from the evaluation


def check_batches_of_the_allocator(mesh):
    """Warm-up passes have the parts of every length that training will have."""
    model = converted("gpt2")
    parallelize_module(model, mesh, ContextParallel())
    seen = watch(model)
    report = warmup_allocator(
        model,
        24,
        batch_size=1,
        example_batch=causal_batch(2),
        scheduler=SequenceLengthScheduler(4, 24, duration=4, step_size=8),
        resize_options={"mode": "reshape"},
        shard_batch=ContextBatches(model),
    )
    assert report.lengths == (24, 4, 12)
    assert {*map(tuple, seen)} == {(3, 4, False), (1, 12, False), (1, 12, True)}  # of 6, 2 and 1 rows


def check_refusals(mesh):
    model, plain, attached = converted("llama"), converted("llama"), converted("gpt2")
    schedule = SequenceLengthScheduler(8, 16, duration=4)
    schedule.attach(attached)
    parallelize_module(model, mesh, ContextParallel())
    input_ids, packed = tokens(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    part = {"input_ids": input_ids, "context_part": "tokens"}
    cache = model(**part, use_cache=True).past_key_values
    refused = [
        ("model", ValueError, lambda: ContextBatches(plain)),
        ("model", ValueError, lambda: sharded_by(plain, "rows").__enter__()),
        ("Linear", ValueError, lambda: parallelize_module(torch.nn.Linear(2, 2), mesh, ContextParallel())),
        ("apply_alibi", ValueError, lambda: apply_alibi(model, 256, learn_slopes=True)),
        ("batch", TypeError, lambda: ContextBatches(model)(Rows(tokens(2, 8)))),
        ("ContextParallel", ValueError, lambda: schedule.attach(model.model)),
        ("scheduler", ValueError, lambda: parallelize_module(attached, mesh, ContextParallel())),
        ("position_ids", ValueError, lambda: model(**part, position_ids=packed, use_cache=False)),
        ("cache", ValueError, lambda: model(**part, past_key_values=cache)),
        ("inputs", ValueError, lambda: model(input_ids)),
    ]
    for name, error, call in refused:
        with pytest.raises(error, match=name):
            call()
    model.eval()
    generated = model.generate(input_ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated.shape == (1, 11)


@dataclasses.dataclass
class Rows:
    input_ids: torch.Tensor


class Attending(torch.nn.Module):
    """A model of torch's layers, whose forward takes no other entries."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.attention = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
        apply_alibi(self, 32)
        self.double()

    def forward(self, input_ids):
        causal = torch.nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.attention(self.embedding(input_ids), src_mask=causal, is_causal=True)


class OfBatches(torch.nn.Module):
    """A model whose forward takes the batch, as Composer's do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(batch["input_ids"])


def check_models_of_ones_own(mesh):
    """The entry comes by name or in a batch; where neither is possible, `sharded_by` says what the inputs are."""
    model, ids = Attending(), tokens(2, 16)
    torch.distributed.broadcast(ids, 0)
    whole = model(ids)
    expected = {"tokens": whole.chunk(2, 1), "rows": whole.chunk(2)}
    by_batch, by_layer = OfBatches(copy.deepcopy(model)), copy.deepcopy(model)
    parallelize_module(model, mesh, ContextParallel())
    parallelize_module(by_batch, mesh, ContextParallel())
    parallelize_module(by_layer, mesh, {"attention": ContextParallel()})
    for by, parts in expected.items():
        part = shard_sequence({"input_ids": ids}, mesh, by=by)
        found = [model(**part), by_batch(part)]
        with sharded_by(by_layer, by):
            found.append(by_layer(part["input_ids"]))
        with sharded_by(model, "rows" if by == "tokens" else "tokens"):  # of batches that say nothing
            found.append(model(**part))
        for out in found:
            torch.testing.assert_close(out, parts[mesh.get_local_rank()])
    for by, parts in expected.items():  # a call that passes the hook by, as that of PEFT, after one that did not
        with sharded_by(model, by):
            out = model.forward(shard_sequence({"input_ids": ids}, mesh, by=by)["input_ids"])
        torch.testing.assert_close(out, parts[mesh.get_local_rank()])
    for other in (by_layer, model.forward):
        with pytest.raises(ValueError, match="inputs"):
            other(part["input_ids"])


def check_accelerate_hooks(mesh):
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = converted("llama")
    _attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match="Accelerate"):
        model(tokens(1, 8))


def check_fully_shard(mesh):
    """Sharded parameters have the gradients of one process: the mean of the ranks."""
    whole, sharded = pair(mesh, "qwen2")
    for layer in (*sharded.model.layers, sharded):
        fully_shard(layer, mesh=mesh)
    batch = ramp_batch(1)
    whole(**batch).loss.backward()
    sharded(**ContextBatches(sharded)(batch)).loss.backward()
    for one, two in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(two.grad.full_tensor(), one.grad)


def check_compiled(mesh):
    """In one graph for whole rows, and one for tokens."""
    model, ids = Attending(), tokens(2, 16)
    torch.distributed.broadcast(ids, 0)
    whole = model(ids)
    parallelize_module(model, mesh, ContextParallel(halo=16))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for by, parts in {"tokens": whole.chunk(2, 1), "rows": whole.chunk(2)}.items():
            out = compiled(**shard_sequence({"input_ids": ids}, mesh, by=by))
            torch.testing.assert_close(out, parts[mesh.get_local_rank()])
    torch._dynamo.reset()


def check_checkpoints(mesh):
    """Gradient checkpointing attends again in backward."""
    _, model = pair(mesh, "llama")
    part = shard_sequence(causal_batch(0), mesh)
    plain = flat_gradient(model, part)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(flat_gradient(model, part), plain)


@pytest.mark.parametrize("name", first_fast(CAUSAL))
def test_rows_of_a_causal_model(name):
    run_on_mesh(assert_trains_as_one, name)


@pytest.mark.parametrize("name", first_fast(["llama", "opt", "qwen2"]))
def test_packed_rows(name):
    run_on_mesh(assert_trains_as_one, name, packed_batch)


@pytest.mark.parametrize("name", first_fast(["bert", "modernbert"]))
def test_rows_of_a_masked_model(name):
    run_on_mesh(functools.partial(assert_trains_as_one, shift=False), name, masked_batch)


@pytest.mark.parametrize(
    ("name", "options"), first_fast([("mistral", {"halo": 8}), ("llama", {"wrap": DistributedDataParallel})])
)
def test_options(name, options):
    run_on_mesh(functools.partial(assert_trains_as_one, **options), name)


@pytest.mark.parametrize(
    "check",
    [
        check_batches,
        check_batches_of_the_allocator,
        check_checkpoints,
        pytest.param(check_compiled, marks=pytest.mark.slow),
        check_fully_shard,
        check_models_of_ones_own,
        check_refusals,
        check_accelerate_hooks,
    ],
)
def test_two_ranks(check):
    run_on_mesh(check)


def check_ragged_rows(mesh, lengths_of_rows):
    """Lengths that the ranks divide and do not divide, of tokens and of whole rows."""
    whole, sharded = pair(mesh, "llama")
    shard = ContextBatches(sharded)
    for rows, length in itertools.product(range(1, mesh.size() + 1), lengths_of_rows):
        input_ids, lengths = tokens(rows, length), length - 7 * torch.arange(rows) % length
        mask = (torch.arange(length) < lengths[:, None]).long()
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}
        found = flat_gradient(sharded, shard(batch))
        torch.distributed.all_reduce(found)
        torch.testing.assert_close(found / mesh.size(), flat_gradient(whole, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "lengths"), [(2, [2, 13]), pytest.param(3, [2, 3, 5, 12, 13, 25], marks=pytest.mark.slow)]
)
def test_ragged_rows(ranks, lengths):
    run_on_mesh(check_ragged_rows, lengths, world_size=ranks)
