"""The recipes of docs/guides/constant_tokens.md: the tokens and the learning rate of every step."""

import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import seqwarm_kernels

from ..docs import markdown
from ..docs.names import LENGTH, VOCABULARY, lightning, plain, rows, transformers_model
from ..docs.test_code_blocks import COUNTED
from ..support.tiers import first_fast

pytestmark = pytest.mark.filterwarnings("ignore")  # hints of the trainers
STEPS = 5  # the ramp takes 1.5 of them
LINEAR = [64, 704, 1024, 1024, 1024]  # 64 + 8 * floor(960 n / 1.5 / 8)
DOUBLING = [64, 512, 1024, 1024, 1024]  # 5 stages of 0.3 steps
BLOCKS = list(markdown.python_blocks((markdown.ROOT / COUNTED).read_text()))
LOOP, HUGGING_FACE, LIGHTNING, BUDGET = range(4)


def names_of_page():
    """What the code takes for granted: 8 rows in each step."""
    import transformers

    of_lightning, full_batch = lightning(), rows(8 * STEPS)
    data = [dict(zip(full_batch, row, strict=True)) for row in zip(*full_batch.values(), strict=True)]
    transformers_model().save_pretrained("gpt2")
    return {
        **plain(),
        "math": math,
        "sw": seqwarm_kernels,
        "AdamW": torch.optim.AdamW,
        "LambdaLR": torch.optim.lr_scheduler.LambdaLR,
        "total_steps": STEPS,
        "warmup_steps": 3,
        "rate": lambda step: 1e-3 / (1 + step),
        "batches": iter(lambda: rows(8), None),
        "dataset": data,
        "arguments": transformers.TrainingArguments(
            "out", max_steps=STEPS, per_device_train_batch_size=8, logging_steps=1, use_cpu=True, report_to=[]
        ),
        "Module": type(of_lightning["module"]),
        "loader": DataLoader(data, batch_size=8),
        "other_arguments": of_lightning["other_arguments"],
    }


def run(code, names, vocabulary=VOCABULARY):
    """The shapes of the token ids, and learning rates, step by step."""
    shapes, rates = [], []

    def see_ids(module, args):
        if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary and torch.is_grad_enabled():
            shapes.append(tuple(args[0].shape))

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(see_ids),
        register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])),
    ]
    exec(code, names)
    for hook in hooks:
        hook.remove()
    return shapes, rates


#: Of each recipe for whole rows: the lengths of its steps, and their learning rates.
RECIPES = {
    LOOP: (LINEAR, lambda names, step, length: names["rate"](step) * math.sqrt(8 * LENGTH // length / 8)),
    HUGGING_FACE: (DOUBLING, lambda names, step, length: 6e-4 * names["cosine"](step) * math.sqrt(LENGTH / length)),
    LIGHTNING: (LINEAR, lambda names, step, length: 6e-4 * math.sqrt(LENGTH / length)),
}


@pytest.mark.parametrize("recipe", first_fast(RECIPES))
def test_steps_of_8_rows_are_cut_as_one_stream(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    names, (lengths, rate_of) = names_of_page(), RECIPES[recipe]
    shapes, rates = run(BLOCKS[recipe].code, names)
    assert shapes == [(8 * LENGTH // length, length) for length in lengths]
    assert rates == pytest.approx([rate_of(names, step, length) for step, length in enumerate(lengths)])
    if recipe == HUGGING_FACE:
        logs = [log["train_tokens"] for log in names["trainer"].state.log_history if "loss" in log]
        assert logs == [8 * LENGTH * step for step in range(1, STEPS + 1)]


def test_a_budget(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, shapes = names_of_page(), []
    names["train_step"] = lambda batch: shapes.append((*batch["input_ids"].shape, batch["max_length_q"]))
    run(BLOCKS[BUDGET].code, names)
    assert shapes == [(1, 8 * LENGTH, length) for length in LINEAR]  # packed
    assert names["optimizer"].param_groups[0]["lr"] == names["rate"](STEPS - 1)  # 8 sequences
