"""Changes and report of apply_alibi, and the undo after an error."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import alibi_slopes, apply_alibi, register_alibi
from seqwarm_kernels.models import alibi_layer, surgery

from .zoo import FAMILIES, HEADS, WIDTH, heads_of, make, tokens, transformers


def state_of(model, *optimizers):
    """Return everything that apply_alibi may change."""
    config = getattr(model, "config", None)
    return (
        repr(model),
        {
            path: (type(module), sorted(module.__dict__), module.training, len(module._forward_pre_hooks))
            for path, module in model.named_modules()
        },
        {name: (id(tensor), tensor.clone()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
        None if config is None else copy.deepcopy(config.__dict__),
        [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers],
    )


def assert_unchanged(before, after):
    assert before[0:2] == after[0:2]
    assert before[2].keys() == after[2].keys()
    for name, (identity, tensor) in before[2].items():
        assert identity == after[2][name][0], name
        assert tensor.equal(after[2][name][1]), name
    assert before[3] == after[3]
    torch.testing.assert_close(before[4], after[4], rtol=0, atol=0)
    assert before[5] == after[5]


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        ids = tokens()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_report():
    model = make("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    report = apply_alibi(model, 128, optimizers=optimizer)
    assert [(layer.path, layer.num_heads, layer.causal) for layer in report.replaced] == [
        ("transformer.h.0.attn", 4, True),
        ("transformer.h.1.attn", 4, True),
    ]
    assert report.removed == (("transformer.wpe", "Embedding", 64 * 32),)
    assert (report.max_seq_length, report.learn_slopes, report.dropped_from_optimizers) == (128, False, 1)
    assert report.verification.calls == 2
    assert report.verification.largest_error < 1e-5
    assert report.verification.smallest_effect > 1e-3
    assert report.verification.largest_position_error < 1e-5
    text = str(report)
    assert "ALiBi with fixed slopes in 2 layers (GPT2Attention), up to 128 tokens" in text
    assert "removed transformer.wpe (Embedding, 2,048 parameters)" in text


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gpt2", "transformer.wpe"),
        ("opt", "model.decoder.embed_positions"),
        ("bert", "bert.embeddings.position_embeddings"),
    ],
)
def test_a_removed_table_reads_as_zeros(name, path):
    model = make(name)
    apply_alibi(model, 4096)
    removed = model.get_submodule(path)
    weight = removed.weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((4096, WIDTH), torch.float32, False)
    assert weight.count_nonzero() == 0
    assert weight.untyped_storage().nbytes() == 4
    assert not [*removed.parameters(), *removed.state_dict()]
    assert model.to(torch.bfloat16).get_submodule(path).weight.dtype == torch.bfloat16
    assert model.to("meta").get_submodule(path).weight.is_meta
    assert model.to_empty(device="cpu").get_submodule(path).weight.count_nonzero() == 0
    assert sum(buffer.untyped_storage().nbytes() for buffer in removed.buffers()) <= 4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_verified(name):
    model = make(name)
    model.train()
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    report = apply_alibi(model, 96)
    assert torch.rand(1).equal(expected_draw)  # the verification draws random numbers, too
    assert all(module.training for module in model.modules())
    assert len(report.replaced) == model.config.num_hidden_layers
    assert {layer.causal for layer in report.replaced} == {FAMILIES[name].causal}
    record = {"max_seq_length": 96, "learn_slopes": False}
    assert model.config.seqwarm_alibi == record
    if hasattr(model.config, "max_position_embeddings"):
        first = model.config.pad_token_id + 1 if name == "roberta" else 0
        assert model.config.max_position_embeddings == 96 + first


def test_optimizers_keep_all_remaining_parameters():
    model = make("gpt2")
    named = [(name, p) for name, p in model.named_parameters() if "wpe" not in name and "wte" not in name]
    tables = [(name, p) for name, p in model.named_parameters() if "wpe" in name or "wte" in name]
    groups = [{"params": named, "lr": 1e-2}, {"params": tables, "weight_decay": 0.5}]
    adam, sgd = torch.optim.AdamW(groups), torch.optim.SGD(model.transformer.wpe.parameters(), momentum=0.9)
    trained(model, adam)
    table = model.transformer.wpe.weight
    before = {id(p): copy.deepcopy(state) for p, state in adam.state.items() if p is not table}
    report = apply_alibi(model, 64, optimizers=[adam, sgd])
    assert report.dropped_from_optimizers == 2
    assert [len(group["params"]) for group in adam.param_groups] == [len(named), 1]
    assert adam.param_groups[1]["param_names"] == ["transformer.wte.weight"]
    assert adam.param_groups[1]["weight_decay"] == 0.5
    assert sgd.param_groups[0]["params"] == []
    torch.testing.assert_close({id(p): state for p, state in adam.state.items()}, before, rtol=0, atol=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    trained(model, adam)
    adam.load_state_dict(adam.state_dict())


def test_a_position_table_that_is_tied_to_another_weight_is_not_dropped():
    model = make("gpt2")
    model.extra = nn.Linear(WIDTH, 64, bias=False)
    model.extra.weight = model.transformer.wpe.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert apply_alibi(model, 64, optimizers=optimizer).dropped_from_optimizers == 0


def step(optimizer, times=1):
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def test_an_optimizer_without_the_learned_slopes_warns_at_its_second_step():
    model, other = make("llama"), make("llama")
    optimizer, foreign = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other))
    apply_alibi(model, 64, learn_slopes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(foreign, 3)
        step(optimizer)
    with pytest.warns(UserWarning, match="2 of 2 learned slopes") as caught:
        step(optimizer)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer)


@pytest.mark.parametrize("case", ["passed", "made later", "a second optimizer", "frozen", "fixed", "deleted"])
def test_no_warning_of_slopes_that_are_trained_or_need_no_training(case):
    model = make("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_alibi(model, 64, learn_slopes=case != "fixed", optimizers=optimizer if case == "passed" else None)
    slopes = [parameter for name, parameter in model.named_parameters() if name.endswith("slopes")]
    optimizers = [optimizer]
    if case == "made later":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    elif case == "a second optimizer":
        optimizers = [optimizer, torch.optim.SGD(slopes, lr=0.1)]
    elif case == "frozen":
        for parameter in slopes:
            parameter.requires_grad_(False)
    elif case == "deleted":
        del model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for each in optimizers:
                step(each)


def test_slopes_can_be_learned():
    model = make("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    apply_alibi(model, 64, optimizers=optimizer, learn_slopes=True)
    slopes = [p for name, p in model.named_parameters() if name.endswith("alibi.slopes")]
    assert [p.shape for p in slopes] == [(HEADS,)] * 2
    group = optimizer.param_groups[-1]
    assert group["params"] == slopes
    assert (group["weight_decay"], group["lr"]) == (0.0, 1e-2)
    model.train()
    trained(model, optimizer)
    assert all((p != alibi_slopes(HEADS)).all() for p in slopes)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_call_changes_the_length_and_keeps_the_slopes(name):
    model, fresh, ids = make(name), make(name), tokens(2, 48)
    apply_alibi(model, 48, learn_slopes=True)
    for heads in heads_of(model):
        heads.slopes.data = torch.rand(HEADS)
    expected, before = model(ids).logits, state_of(model)
    with pytest.raises(TypeError, match="example_batch"):
        apply_alibi(model, 96, learn_slopes=True, example_batch=3)
    with pytest.raises(ValueError, match="verification"):
        apply_alibi(model, 96, learn_slopes=True, example_batch={"input_ids": None})
    assert_unchanged(before, state_of(model))
    report = apply_alibi(model, 96, learn_slopes=True)
    assert (report.max_seq_length, len(report.replaced), report.removed) == (96, model.config.num_hidden_layers, ())
    assert model(ids).logits.equal(expected)
    apply_alibi(fresh, 96, learn_slopes=True)
    assert model.config.to_dict() == fresh.config.to_dict()
    for (_, buffer), (other, expected_buffer) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert buffer.shape == expected_buffer.shape, other
    hooks = [[len(module._forward_pre_hooks) for module in part.modules()] for part in (model, fresh)]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize("learned", [False, True])
def test_slopes_stay_float32(learned):
    model = make("bloom", n_head=6, hidden_size=36)
    apply_alibi(model, 64, learn_slopes=learned)
    expected = alibi_slopes(6)
    for heads in heads_of(model.to(torch.bfloat16)):
        assert heads.slopes.dtype == torch.float32
        assert heads.slopes.equal(expected)
    assert model(tokens()).logits.dtype == torch.bfloat16
    assert all(heads.slopes.dtype == torch.float32 for heads in heads_of(model.double()))


def test_models_in_half_precision_and_on_the_meta_device():
    for dtype in (torch.bfloat16, torch.float16):
        assert apply_alibi(make("gpt2", dtype), 64).verification.calls == 2
    report = apply_alibi(make("llama").to("meta"), 64)
    assert report.verification is None
    assert "not verified" in str(report)


def windows_disagree():
    model = make("qwen2")
    model.model.layers[1].self_attn.sliding_window = 5
    return model


def relative_positions():
    model = make("bert")
    model.config.position_embedding_type = "relative_key"
    return model


def learning():
    model = make("gpt2")
    apply_alibi(model, 64, learn_slopes=True)
    return model


def compiled():
    model = make("gpt2")
    model.compile()
    return model


def electra():
    return transformers.ElectraModel(
        transformers.ElectraConfig(vocab_size=9, hidden_size=16, num_attention_heads=4, num_hidden_layers=1)
    )


def strange_multihead_attention():
    return nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4))


UNSUPPORTED = [
    (windows_disagree, "window"),
    (relative_positions, "position_embedding_type"),
    (learning, "learn_slopes"),
    (compiled, "compiled"),
    (lambda: torch.compile(make("gpt2")), "compiled"),
    (electra, "ElectraModel"),
    (strange_multihead_attention, "kdim"),
    (lambda: nn.Linear(2, 2), "Linear"),
]


@pytest.mark.parametrize(("make_model", "name"), UNSUPPORTED)
def test_unsupported_models_raise_and_stay_unchanged(make_model, name):
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()])
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=name):
        apply_alibi(model, 64, optimizers=optimizer)
    assert_unchanged(before, state_of(model, optimizer))


def test_wrapped_models_raise(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="wrapped"):
            apply_alibi(DistributedDataParallel(make("gpt2")), 64)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="sharded"):
            apply_alibi(torch.distributed.fsdp.fully_shard(make("gpt2"), mesh=mesh), 64)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("learn_slopes", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_failed_verification_undoes_everything(name, learn_slopes, monkeypatch):
    """Attention is patched to ignore the slopes: the verification must fail."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    before = state_of(model, optimizer)
    attention = alibi_layer.alibi_attention

    def without_slopes(query, key, value, slopes, *, backend=None, **options):
        return attention(query, key, value, slopes if backend else 0 * slopes, backend=backend, **options)

    monkeypatch.setattr(alibi_layer, "alibi_attention", without_slopes)
    with pytest.raises(ValueError, match="not ALiBi attention"):
        apply_alibi(model, 256, optimizers=optimizer, learn_slopes=learn_slopes)
    assert_unchanged(before, state_of(model, optimizer))
    trained(model, optimizer)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Encoder(nn.Module):
    """A user's model of PyTorch's layers."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = Positions()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens, padding=None):
        return self.layers(self.positions(self.embedding(tokens)), src_key_padding_mask=padding)


def test_remaining_positions_are_found_and_a_registered_converter_removes_them(monkeypatch):
    model = Encoder()
    before = state_of(model)
    with pytest.raises(ValueError, match="equal tokens"):
        apply_alibi(model, 64)
    assert_unchanged(before, state_of(model))

    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))

    @register_alibi(Positions)
    def convert(module, surgery):
        surgery.replace(module, nn.Identity())

    report = apply_alibi(model, 64)
    assert [source[:2] for source in report.removed] == [("positions", "Positions")]
    assert isinstance(model.positions, nn.Identity)


class CustomAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.mix(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if hasattr(self, "alibi"):
            return alibi_layer.alibi_layer_attention(self, query, key, value).transpose(1, 2).flatten(2)
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def test_a_registered_attention_is_converted(monkeypatch):
    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))
    model = nn.Sequential(nn.Embedding(11, WIDTH), CustomAttention())

    @register_alibi(CustomAttention)
    def convert(module, surgery):
        surgery.give_alibi(module, HEADS, causal=True)

    assert apply_alibi(model, 64).replaced == (("1", "CustomAttention", HEADS, True),)
