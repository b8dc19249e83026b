"""Models that get segments and windows: losses of a loop cut by hand, nothing seen across a boundary, one graph.

tests/trainers/test_contract.py has the trainers, and a loop with the schedule attached.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

import seqwarm_kernels.models.seqwarm  # noqa: F401
from seqwarm_kernels import SequenceLengthScheduler, alibi_attention, resize_batch

from .zoo import VOCABULARY, changed_by, converted, make, small, transformers

LENGTH, IGNORED = 24, -100

MODELS = {
    "gpt2-alibi": lambda: converted("gpt2", torch.float64),
    "llama-sdpa": lambda: make("llama", torch.float64, "sdpa"),
    "llama-seqwarm": lambda: make("llama", torch.float64, "seqwarm"),
}

SEGMENTS, WINDOW = {"mode": "segments"}, {"mode": "window"}


def made(name, layers=2):
    """torch.compile takes seconds for each layer."""
    model = MODELS[name]().train()
    del (model.base_model.h if name == "gpt2-alibi" else model.base_model.layers)[layers:]
    model.loss_type = "ForCausalLM"  # else the loss of GPT-2 warns, which a graph cannot hold
    return model


def random_ids():
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def batch_of(ids):
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def schedule(shortest, longest=LENGTH, duration=8):
    return SequenceLengthScheduler(shortest, longest, duration=duration, step_size=1)


def by_hand(model, pieces):
    """The mean loss of pieces of rows, each of which the model gets alone."""
    total, count = 0.0, 0
    for ids in pieces:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        total += cross_entropy(logits[:-1], ids[1:], reduction="sum", ignore_index=IGNORED).item()
        count += len(ids) - 1
    return total / count


LEFT, RIGHT, DOCUMENTS = 5, 3, (7, 10, 7)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("gpt2-alibi", kind) for kind in ("left", "right", "packed")),
        *(("llama-sdpa", kind) for kind in ("left", "packed")),
        ("llama-seqwarm", "left"),
    ],
)
def test_padded_and_packed_rows_are_those_of_a_loop_cut_by_hand(name, kind):
    model, batch = made(name), batch_of(random_ids())
    ids = batch["input_ids"]
    if kind == "packed":
        del batch["attention_mask"]
        batch["position_ids"] = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(2, -1)
        runs = [run for row in ids for run in row.split(DOCUMENTS)]
    else:
        hidden = slice(None, LEFT) if kind == "left" else slice(-RIGHT, None)
        batch["attention_mask"][0, hidden] = 0
        runs = [ids[0, batch["attention_mask"][0] == 1], ids[1]]
    expected = by_hand(model, [piece for run in runs for piece in run.split(4)])
    attachment = schedule(4).attach(model, mode="segments", documents=len(DOCUMENTS))
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    assert attachment.take_seen() == (sum(map(len, runs)), 2)
    assert attachment.seq_length == 4


ONES = torch.ones(1, LENGTH, dtype=torch.long)
#: Each is a way in which a model of transformers would read position ids of segments no more.
LEAKS = {
    "no mask": {},
    "a mask of ones": {"attention_mask": ONES},
    "padding": {"attention_mask": (torch.arange(LENGTH) >= LEFT).long()[None]},
    "a cache": {"use_cache": True},
    "positions": {"position_ids": torch.arange(LENGTH)[None]},
    "labels": {"labels": ONES},
}


@pytest.mark.parametrize(
    ("name", "leak"),
    [
        *(("llama-sdpa", leak) for leak in LEAKS),
        *(("gpt2-alibi", leak) for leak in ("padding", "a cache")),
        ("llama-seqwarm", "a cache"),
    ],
)
def test_a_token_changes_the_logits_of_its_own_segment_only(name, leak):
    model, length = made(name), 6
    schedule(length).attach(model, mode="segments")
    position = LEFT + length + 1 if leak == "padding" else length + 1
    changed = changed_by(model, position, LENGTH, **LEAKS[leak])
    assert changed == [*range(position, position + length - 1)]


@pytest.mark.parametrize("name", ["gpt2-alibi", "llama-seqwarm"])
def test_a_window_limits_what_a_token_sees(name):
    model, length = made(name), 3
    schedule(length).attach(model, mode="window")
    assert changed_by(model, 0, LENGTH) == [*range(2 * (length - 1) + 1)]  # of two layers


@pytest.mark.parametrize(
    ("name", "boundaries"),
    [("gpt2-alibi", "cu_seq_lens"), pytest.param("llama-sdpa", "position_ids", marks=pytest.mark.slow)],
)
def test_a_compiled_model_compiles_once_in_a_ramp(name, boundaries):
    model, counter, scheduler = made(name, layers=1).float(), CompileCounter(), schedule(4, 7, duration=3)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    scheduler.attach(compiled, mode="segments")
    lengths = []
    for _ in range(4):
        batch = batch_of(random_ids())
        loss = compiled(**batch).loss
        loss.backward()
        expected = model(**scheduler.resize(batch, mode="segments", boundaries=boundaries)).loss
        torch.testing.assert_close(loss, expected)
        lengths.append(scheduler.seq_length)
        scheduler.step()
    assert lengths == [4, 5, 6, 7]
    assert counter.frame_count == 1


def test_a_ramp_of_resize_in_a_graph_compiles_twice():
    """For the first length, and for all others."""
    counter, scheduler, ids = CompileCounter(), schedule(4, 7, duration=3), random_ids()

    def told(ids):
        segments = scheduler.resize({"input_ids": ids}, mode="segments", boundaries="cu_seq_lens")
        window = scheduler.resize({"input_ids": ids}, mode="window")
        return ids[0, :1] + segments["cu_seq_lens_q"] + window["window"]

    compiled = torch.compile(told, backend=counter, fullgraph=True)
    for _ in range(4):
        assert compiled(ids).equal(told(ids))
        scheduler.step()
    assert counter.frame_count == 2


class Wrapper(nn.Module):
    """Passes on what its function makes of the arguments, instead of all of them."""

    def __init__(self, model, passes):
        super().__init__()
        self.model, self.passes = model, passes

    def forward(self, input_ids, labels=None, **others):
        return self.model(input_ids=input_ids, labels=labels, **self.passes(input_ids, others))


#: What a wrapper passes on, and the entry that its error names.
WRONGLY_PASSED = {
    "nothing": (lambda ids, others: {}, "'position_ids'|'cu_seq_lens_q'|'window'"),
    "no word on the cache": (lambda ids, others: others | {"use_cache": None}, "use_cache"),
    "a cache": (lambda ids, others: others | {"past_key_values": transformers.DynamicCache()}, "past_key_values"),
    "a cache since 5.24": (lambda ids, others: others | {"cache": transformers.DynamicCache()}, "^cache"),
    "no positions": (lambda ids, others: others | {"position_ids": None}, "position_ids"),
    "a mask of its own": (lambda ids, others: others | {"attention_mask": torch.ones_like(ids)}, "attention_mask"),
}


@pytest.mark.parametrize(
    ("name", "mode", "passes", "compiles"),
    [
        *(("llama-sdpa", "segments", passes, False) for passes in WRONGLY_PASSED),
        ("llama-sdpa", "segments", "nothing", True),
        ("llama-seqwarm", "segments", "no positions", False),
        ("gpt2-alibi", "segments", "nothing", False),
        ("gpt2-alibi", "window", "nothing", False),
    ],
)
def test_a_wrapper_that_does_not_pass_the_segments_on_raises(name, mode, passes, compiles):
    """It would train on whole rows."""
    function, message = WRONGLY_PASSED[passes]
    model = Wrapper(made(name, layers=1).eval(), function)  # as `from_pretrained` returns it
    model.training = True
    model = torch.compile(model, backend="eager") if compiles else model
    attachment, ids = schedule(4).attach(model, mode=mode), random_ids()
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, labels=ids)
    if not compiles:
        model.eval()(input_ids=ids)
        attachment.remove()
        model.train()(input_ids=ids)


def test_a_wrapper_that_takes_no_segments_raises():
    model = Wrapper(made("llama-sdpa"), None)
    model.forward = lambda input_ids, labels=None: model.model(input_ids=input_ids, labels=labels)
    schedule(4).attach(model, mode="segments")
    with pytest.raises(ValueError, match="'position_ids'"):
        model(random_ids(), random_ids())


def test_a_model_that_takes_a_whole_batch_gets_all_of_it():
    class Whole(nn.Module):
        def forward(self, batch):
            return batch

    model = Whole()
    schedule(4).attach(model, mode="segments", boundaries="segment_length")
    assert model({"input_ids": random_ids()}).keys() == {"input_ids", "position_ids", "segment_length"}


def test_data_parallel_splits_no_boundaries():
    """It would give each device a part of them, beside some rows."""
    model, seen = made("llama-seqwarm"), []
    parallel = nn.DataParallel(model)
    with pytest.raises(ValueError, match="boundaries"):
        schedule(4).attach(parallel, mode="segments", boundaries="cu_seq_lens")
    schedule(4).attach(parallel, mode="segments")
    model.register_forward_pre_hook(lambda model, args, kwargs: seen.extend(kwargs), with_kwargs=True)
    parallel(input_ids=random_ids())
    assert {*seen} == {"input_ids", "position_ids", "use_cache"}


def test_attaching_leaves_nothing_in_the_cache_of_autocast():
    """The test of the model fills in parameters that are zero, such as biases."""
    model, ids = make("gpt2"), random_ids()
    with torch.autocast("cpu"):
        expected = model(ids).logits
    with torch.autocast("cpu"):
        schedule(4).attach(model, mode="segments")
        assert torch.equal(model(ids).logits, expected)


def test_a_wrapper_that_passes_the_segments_on_trains_as_its_model():
    ids, found = random_ids(), []
    for model in (made("llama-sdpa"), Wrapper(made("llama-sdpa"), lambda ids, others: others)):
        schedule(4).attach(model, mode="segments")
        found.append(model(input_ids=ids, labels=ids).loss)
    assert torch.equal(*found)


class Pair(nn.Module):
    """A teacher, and the student that is trained."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, input_ids, **others):
        return self.student(input_ids=input_ids)


def test_all_models_in_a_model_are_told():
    model = Pair(make("llama"), make("llama")).train()
    schedule(4).attach(model, mode="segments")
    with pytest.raises(ValueError, match="position_ids"):
        model(input_ids=random_ids())


class Own(nn.Module):
    """Keeps what its forward gets."""

    def __init__(self, takes):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.forward = {
            "segment_length": lambda ids, segment_length=None: self.attend(ids, segment_length=segment_length),
            "window": lambda ids, window=None: self.attend(ids, window=window),
            "cu_seq_lens_q": lambda ids, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None: (
                cu_seq_lens_q
            ),
            "nothing": lambda ids: ids,
        }[takes]

    def attend(self, ids, **limits):
        x = self.embedding(ids)[:, None]
        return alibi_attention(x, x, x, **limits)


def test_models_of_ones_own_name_what_they_take():
    ids = random_ids()
    for takes, mode, limit in (("segment_length", "segments", 4), ("window", "window", 3)):
        model = Own(takes)
        expected = model(ids, limit)
        schedule(4).attach(model, mode=mode)
        assert torch.equal(model(ids), expected)
    model = Own("cu_seq_lens_q")
    schedule(4).attach(model, mode="segments")
    assert model(ids).tolist() == [*range(0, 2 * LENGTH + 1, 4), *[2 * LENGTH] * 2]


def lfm2():
    """Its weights are so small that tokens change others by 1e-3 of their own change."""
    return small("Lfm2ForCausalLM", layer_types=["conv", "full_attention"])


def t5():
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def bloom_with_zeros():
    """Its projections are zero, and hide what its attention sees."""
    model = make("bloom")
    for layer in model.transformer.h:
        nn.init.zeros_(layer.self_attention.dense.weight)
    return model


@pytest.mark.parametrize(
    ("make_model", "options", "name"),
    [
        (lambda: Own("nothing"), SEGMENTS, "segment_length"),
        (lambda: Own("nothing"), WINDOW, "window"),
        (lambda: make("llama"), WINDOW, "window"),
        (lambda: make("bloom"), SEGMENTS, "position_ids"),
        (lambda: Wrapper(make("llama"), dict), SEGMENTS | {"boundaries": "segment_length"}, "segment_length"),
        (lambda: make("bert"), SEGMENTS, "position_ids"),
        (lambda: make("roberta", attention="seqwarm"), SEGMENTS, "positions"),
        (lfm2, SEGMENTS, "position_ids"),
        (lambda: lfm2().bfloat16(), SEGMENTS, "position_ids"),
        (t5, SEGMENTS, "encoder"),
        (lambda: Pair(make("llama"), make("bloom")), SEGMENTS, "Bloom"),
        (bloom_with_zeros, SEGMENTS, "Bloom"),
    ],
)
def test_models_that_cannot_be_told_are_refused(make_model, options, name):
    torch.manual_seed(0)
    model = make_model().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=name):
        schedule(4).attach(model, **options)
    assert model.training
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    schedule(4).attach(model)  # nothing is left of the first


def test_a_model_of_experts_is_not_refused():
    """Its experts round the same token differently, as other tokens come and go."""
    schedule(4).attach(small("MixtralForCausalLM").train(), mode="segments")


def test_labels_of_a_model_that_does_not_shift_them_are_kept():
    model, ids = small("LlamaForTokenClassification", num_labels=3, classifier_dropout=0.0).double(), random_ids()
    labels = ids % 3
    pieces = zip(ids.split(4, 1), labels.split(4, 1), strict=True)
    parts = [model(input_ids=each.contiguous(), labels=own.contiguous()).loss.item() for each, own in pieces]
    schedule(4).attach(model.train(), mode="segments")
    expected = sum(parts) / len(parts)
    assert model(input_ids=ids, labels=labels).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_flex_attention_keeps_segments_apart():
    """Its forward. It has no backward on a CPU, so `attach` refuses it there."""
    model, other = make("llama", attention="flex_attention"), make("llama", attention="sdpa")
    batch = {"input_ids": torch.randint(VOCABULARY, (2, 64))}  # of other lengths torch 2.13 has wrong results with AVX2
    with torch.no_grad():
        segments = model(**resize_batch(batch, 16, mode="segments")).logits
        expected = other(**resize_batch(batch, 16, mode="flatten"), use_cache=False).logits
    torch.testing.assert_close(segments, expected.view_as(segments), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="FlexAttention"):
        schedule(4).attach(model, mode="segments")
