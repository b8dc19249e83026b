"""Models under tensor parallelism train with the losses of one process, and save all slopes."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import seqwarm_kernels as sw
from seqwarm_kernels.models import AlibiHeads
from seqwarm_kernels.parallel import ShardSlopes

from ..models import zoo
from ..models.zoo import transformers
from ..support.ranks import run_on_mesh
from ..support.tiers import first_fast

distributed = pytest.importorskip("transformers.distributed")

MODELS = zoo.FAMILIES | zoo.OTHERS
#: Families with a plan of tensor parallelism in transformers.
PLANNED = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", "granite")
ALL_HEADS = ("olmo2", "phi3")  # their plans gather the heads before attention
ATTENTION = "model.layers.*.self_attn"
PLAN = {f"{ATTENTION}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
PLAN[f"{ATTENTION}.o_proj"] = RowwiseParallel()


def batches():
    torch.manual_seed(1)
    return [zoo.tokens() for _ in range(3)]


def losses(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    found = []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def load(name, folder, **options):
    config = distributed.DistributedConfig(**options) if options else None
    return getattr(transformers, MODELS[name].model).from_pretrained(folder, distributed_config=config)


def slopes_of(model):
    return [module.slopes for module in model.modules() if isinstance(module, AlibiHeads)]


def saved(mesh, name, folder):
    """Saves a model for all ranks."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if mesh.get_rank() == 0:
        zoo.make(name).save_pretrained(folder / name)
    torch.distributed.barrier()


def check_planned(mesh, folder, name, learn_slopes):
    """`from_pretrained` with a plan, then `apply_alibi`; the saved checkpoint is that of one process."""
    saved(mesh, name, folder)
    alone = load(name, folder / name)
    sw.apply_alibi(alone, 64, learn_slopes=learn_slopes)
    together = load(name, folder / name, tp_size=2)
    sw.apply_alibi(together, 64, learn_slopes=learn_slopes)
    assert all(isinstance(slopes, DTensor) == (name not in ALL_HEADS) for slopes in slopes_of(together)), name
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5), name
    written = folder / f"{name}-saved"
    together.save_pretrained(written)
    torch.distributed.barrier()
    again = sw.load_alibi_model(type(alone), written)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    tokens = batches()[0]
    config = distributed.DistributedConfig(tp_size=2)
    loaded = sw.load_alibi_model(type(alone), written, distributed_config=config)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, again(tokens).logits, rtol=1e-4, atol=1e-5)


def check_parallelized(mesh, folder, learn_slopes):
    """torch's `parallelize_module` after `apply_alibi`; saved as the guide says."""
    alone, together = zoo.make("llama"), zoo.make("llama")
    slopes = [[0.9, 0.5, 0.2, 0.1], [0.8, 0.4, 0.3, 0.0]]
    for model in (alone, together):
        sw.apply_alibi(model, 64, learn_slopes=learn_slopes, slopes=slopes)
    parallelize_module(together, mesh, PLAN | {f"{ATTENTION}.alibi": ShardSlopes()})
    assert [tensor.to_local().shape for tensor in slopes_of(together)] == [(2,), (2,)]
    assert [tensor.requires_grad for tensor in slopes_of(together)] == [learn_slopes] * 2
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(together, options=options)
    expected = alone.state_dict()
    if mesh.get_rank() == 0:
        assert state.keys() == expected.keys()
        torch.testing.assert_close(dict(state), dict(expected), rtol=1e-4, atol=1e-5)
        together.save_pretrained(folder, state_dict=state)
        loaded = sw.load_alibi_model(type(alone), folder).state_dict()
        torch.testing.assert_close(dict(loaded), dict(expected), rtol=1e-4, atol=1e-5)
    heads = next(module for module in together.modules() if isinstance(module, AlibiHeads))
    heads.reset_parameters()
    assert heads.slopes.full_tensor().tolist() == pytest.approx(slopes[0])
    assert together.to(torch.bfloat16) is together
    assert heads.slopes.dtype == torch.float32
    together.float()
    sw.apply_alibi(together, 64, learn_slopes=learn_slopes, slopes=slopes[::-1])  # a second call
    assert heads.slopes.full_tensor().tolist() == pytest.approx(slopes[1])


def check_dropout(mesh):
    """Each head draws the mask that it has in one process, on whatever rank, also packed and in float64."""
    packed = {"position_ids": torch.tensor([[*range(7), *range(13)]]), "use_cache": False}
    for learn_slopes, more in ((False, {}), (True, packed)):
        found = []
        for shard in (False, True):
            model = zoo.make("llama", torch.float64, attention_dropout=0.5).train()
            sw.apply_alibi(model, 64, learn_slopes=learn_slopes)
            if shard:
                parallelize_module(model, mesh, PLAN | {f"{ATTENTION}.alibi": ShardSlopes()})
            tokens = batches()[0]
            torch.manual_seed(3)
            loss = model(input_ids=tokens, labels=tokens, **more).loss
            loss.backward()
            slopes = slopes_of(model)[0].grad
            gradient = slopes.full_tensor() if isinstance(slopes, DTensor) else slopes
            found.append((loss.item(), gradient, model.model.embed_tokens.weight.grad))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


def check_refused(mesh, folder):
    saved(mesh, "gemma", folder)  # which has one key head
    with pytest.raises(ValueError, match="tp_size"):
        sw.apply_alibi(load("gemma", folder / "gemma", tp_size=2), 64)
    without_slopes, converted_first = zoo.make("llama"), zoo.make("llama")
    for model in (without_slopes, converted_first):
        sw.apply_alibi(model, 64)
    parallelize_module(without_slopes, mesh, PLAN)
    parallelized_first = parallelize_module(zoo.make("llama"), mesh, PLAN)
    config = distributed.DistributedConfig(tp_size=2)
    _, _, mesh_manager = type(converted_first).prepare_distribute_model(config)
    type(converted_first).maybe_distribute_model(converted_first, config, mesh_manager)
    ids = zoo.tokens()
    for call in (
        lambda: without_slopes(ids),
        lambda: sw.apply_alibi(parallelized_first, 64),
        lambda: converted_first(ids),
    ):
        with pytest.raises(ValueError, match="ShardSlopes"):
            call()
    sw.apply_alibi(converted_first, 64)  # a second call
    converted_first(ids)
    with pytest.raises(ValueError, match="mesh"):
        parallelize_module(AlibiHeads([0.1, 0.2, 0.3], causal=True), mesh, ShardSlopes())


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_plans(tmp_path, name):
    run_on_mesh(check_planned, tmp_path, name, PLANNED.index(name) % 2 == 1)


@pytest.mark.parametrize("learn_slopes", first_fast([True, False]))
def test_a_parallelized_model(tmp_path, learn_slopes):
    run_on_mesh(check_parallelized, tmp_path, learn_slopes)


@pytest.mark.slow
def test_dropout():
    run_on_mesh(check_dropout)


@pytest.mark.slow
def test_refused(tmp_path):
    run_on_mesh(check_refused, tmp_path)
