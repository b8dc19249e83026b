"""What apply_alibi and converted models refuse: an error names the reason, and everything is as before."""

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models import AlibiHeads, surgery

from ..support.same import assert_same
from .zoo import FAMILIES, HEADS, VOCABULARY, WIDTH, converted, make, tokens, transformers


def state_of(model, *optimizers):
    """Return everything that apply_alibi may change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    config = getattr(model, "config", None)
    return [
        repr(model),
        [(path, type(each), sorted(vars(each)), each.training) for path, each in model.named_modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        [(name, id(tensor), tensor.detach().clone()) for name, tensor in tensors],
        None if config is None else copy.deepcopy(vars(config)),
        [copy.deepcopy(sorted(optimizer.state_dict()["state"].items())) for optimizer in optimizers],
        [copy.deepcopy(optimizer.state_dict()["param_groups"]) for optimizer in optimizers],
        [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers],
    ]


def words():
    return nn.Embedding(VOCABULARY, WIDTH)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), 1)


class Positions(nn.Module):
    """A table of positions that no converter knows. Faint ones must be found, too."""

    def __init__(self, size=1.0):
        super().__init__()
        self.table = nn.Parameter(size * torch.randn(64, WIDTH))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Late(nn.Module):
    """Adds what `rule` makes of the positions."""

    def __init__(self, rule):
        super().__init__()
        self.words, self.rule, self.layers, self.last = words(), rule, encoder(), []

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(len(input_ids), -1)
        self.last.append(int(position_ids.max()))
        return self.layers(self.words(input_ids) + self.rule(position_ids)[..., None])


def windows_disagree():
    model = make("qwen2")
    model.model.layers[1].self_attn.sliding_window = 5
    return model


def relative_positions():
    model = make("bert")
    model.config.position_embedding_type = "relative_key"
    return model


def compiled_in_place():
    model = make("gpt2")
    model.compile(backend="eager")
    return model


def temperature_by_position():
    """Queries are multiplied by 1 + beta log(1 + position // 32)."""
    config = transformers.Ministral3Config(**FAMILIES["llama"].options, head_dim=8)
    config.rope_parameters |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
    return transformers.Ministral3ForCausalLM(config).eval()


def rotations_shared_with_a_foreign_layer():
    model = make("llama")
    foreign = model.model.layers[1].self_attn
    foreign.is_causal = False
    foreign.__class__ = type("Foreign", (nn.Module,), {"forward": type(foreign).forward})
    return model


def with_a_module_that_is_never_called():
    model = make("gpt2")
    model.spare = nn.Sequential(nn.MultiheadAttention(8, 2))
    return model


POSITIONS = {"input_ids": tokens(2, 9), "position_ids": torch.arange(9).expand(2, -1)}

#: A model, what the error names, and an example batch.
REFUSED = {
    "windows that disagree": (windows_disagree, "window"),
    "relative positions": (relative_positions, "position_embedding_type"),
    "a temperature by position": (temperature_by_position, "llama_4_scaling_beta"),
    "shared rotations": (rotations_shared_with_a_foreign_layer, r"model\.rotary_emb"),
    "other learn_slopes": (lambda: converted("gpt2", learn_slopes=True), "learn_slopes"),
    "compiled in place": (compiled_in_place, "compiled"),
    "compiled": (lambda: torch.compile(make("gpt2"), backend="eager"), "compiled"),
    "no attention": (lambda: nn.Linear(2, 2), "Linear"),
    "other sizes of keys": (lambda: nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4)), "kdim"),
    "attention that is never called": (with_a_module_that_is_never_called, r"spare\.0"),
    "positions": (lambda: nn.Sequential(words(), Positions(), encoder()), "equal tokens"),
    "faint positions": (lambda: nn.Sequential(words(), Positions(0.02), encoder()), "positions"),
    "faint positions in bfloat16": (lambda: nn.Sequential(words(), Positions(0.02), encoder()).bfloat16(), "positions"),
    "positions from the caller": (lambda: Late(lambda positions: 0.1 * positions), "equal tokens", POSITIONS),
    "late positions": (lambda: Late(lambda positions: 0.1 * (positions >= 32)), "position_ids", POSITIONS),
    "late positions, unnamed": (
        lambda: Late(lambda positions: 0.1 * (positions >= 32)),
        "position_ids",
        tuple(POSITIONS.values()),
    ),
    "a table that ends early": (lambda: Late(lambda positions: torch.zeros(32)[positions]), "position_ids", POSITIONS),
    "inputs that cannot be guessed": (lambda: nn.Sequential(nn.Linear(3, WIDTH), encoder()), "example_batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused_stay_unchanged(case):
    make_model, name, *batch = REFUSED[case]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=name):
        apply_alibi(model, 64, optimizers=optimizer, example_batch=batch[0] if batch else None)
    assert_same(before, state_of(model, optimizer))


def test_wrapped_models_are_refused(mesh):
    with pytest.raises(ValueError, match="wrapped"):
        apply_alibi(DistributedDataParallel(make("gpt2")), 64)
    with pytest.raises(ValueError, match="sharded"):
        apply_alibi(torch.distributed.fsdp.fully_shard(make("gpt2"), mesh=mesh), 64)


def test_offloaded_models_are_refused():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="offloaded"):
        apply_alibi(accelerate.cpu_offload(make("llama"), execution_device="cpu"), 64)


def test_a_temperature_by_position_may_be_turned_off():
    model = temperature_by_position()
    model.config.rope_parameters["llama_4_scaling_beta"] = 0
    apply_alibi(model, 256)
    ids, positions = tokens(1, 20), torch.arange(20)[None]
    expected = model(ids, position_ids=positions).logits
    torch.testing.assert_close(model(ids, position_ids=positions + 1000).logits, expected)


def no_positions(positions):
    return 0.0 * positions


def ends_at_16(positions):
    return torch.zeros(16)[positions]


LAST = {"input_ids": tokens(1, 9), "position_ids": torch.arange(55, 64)[None]}


@pytest.mark.parametrize(
    ("rule", "batch", "last"),
    [
        (no_positions, POSITIONS, [8, 8, 63]),
        (no_positions, LAST, [63, 63]),
        # Without positions in the example, the argument of an own model may mean something else.
        (ends_at_16, None, [15, 15]),
        (ends_at_16, (tokens(2, 9),), [8, 8]),
        (ends_at_16, {"input_ids": tokens(2, 9)}, [8, 8]),
    ],
)
def test_positions_up_to_max_seq_length_are_tried_if_the_example_has_some(rule, batch, last):
    model = Late(rule)
    assert apply_alibi(model, 64, example_batch=batch).verification.calls == 1
    assert model.last == last


def test_models_of_transformers_are_tried_at_positions_up_to_max_seq_length():
    model, seen = make("llama"), []
    model.register_forward_pre_hook(lambda *args: seen.append(args[-1].get("position_ids")), with_kwargs=True)
    apply_alibi(model, 4096)
    *others, last = seen
    assert all(ids is None for ids in others)
    assert last[0, [0, -1]].tolist() == [4080, 4095]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_seq_length", 1, ValueError),
        ("max_seq_length", 2**31, ValueError),
        ("max_seq_length", 64.0, TypeError),
        ("learn_slopes", 1, TypeError),
    ],
)
def test_bad_arguments_of_apply_alibi(name, value, error, monkeypatch):
    monkeypatch.setattr(surgery.Surgery, "replace", None)  # nothing is replaced
    with pytest.raises(error, match=name):
        apply_alibi(**{"model": make("gpt2"), "max_seq_length": 64, name: value})


def test_a_length_of_numpy_is_taken():
    model = make("gpt2")
    report = apply_alibi(model, numpy.int64(64))
    assert type(report.max_seq_length) is type(model.config.max_position_embeddings) is int


@pytest.mark.parametrize("slopes", [[], [float("nan")], [0.5, -1e39]])
def test_bad_slopes_of_alibi_heads(slopes):
    with pytest.raises(ValueError, match="slopes"):
        AlibiHeads(slopes, causal=True)


@pytest.mark.parametrize(("name", "value"), [("num_heads", 0), ("slopes", [0.5])])
def test_bad_arguments_of_give_alibi(name, value):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=name):
        surgery.Surgery(layer, 8, False).give_alibi(layer, **{"num_heads": 2, "causal": True, name: value})
    assert not hasattr(layer, "alibi")


def test_another_attention_after_the_conversion_is_refused():
    model = converted("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention"):
        model(tokens())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.int8), ("bert", torch.float32), ("mistral", torch.int64)],
)
def test_dense_masks_are_refused(name, dtype):
    """Those of integers were read as masks of our own: their first row alone, as padding or as packed sequences."""
    model, ids = converted(name), tokens(2, 9)
    causal_and_padded = torch.ones(2, 1, 9, 9).tril() * (torch.arange(9) >= 2)
    mask = causal_and_padded.to(dtype)
    if dtype.is_floating_point:
        mask = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)
    inner = next(part for part in model.children() if isinstance(part, transformers.PreTrainedModel))
    for call in (model, inner):
        with pytest.raises(ValueError, match="attention_mask"):
            call(ids, attention_mask=mask)


def test_a_learning_rate_scheduler_that_is_made_too_early_is_refused():
    model = make("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="group"):
        apply_alibi(model, 64, optimizers=optimizer, learn_slopes=True)
    apply_alibi(model, 64, optimizers=optimizer)
