"""What the code of a page takes for granted: `NAMES[page]()` makes it, in a folder of its own."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH = 50, 1024


def with_optimizer(model):
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))

    def forward(self, input_ids):  # as warmup_allocator calls it
        return super().forward(input_ids)


def transformers_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))


def loss_fn(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def rows(count=2, length=LENGTH):
    tokens = torch.randint(VOCABULARY, (count, length))
    return {"input_ids": tokens, "labels": tokens}


def dataset(length=LENGTH):
    return [{name: tensor[0] for name, tensor in rows(1, length).items()} for _ in range(4)]


def queries():
    return dict(zip(("query", "key", "value"), torch.randn(3, 1, 8, 16, 4), strict=True))


def readme():
    return {**with_optimizer(transformers_model()), **queries(), "loader": [rows(), rows()], "num_heads": 8}


def plain():
    """A small model, its optimizer, and an endless loader."""
    return {
        **with_optimizer(Small()),
        "loss_fn": loss_fn,
        "total_tokens": 16 * LENGTH,
        "batch": rows(),
        "batches": iter(rows, None),
        "loader": [rows() for _ in range(64)],
        "torch": torch,
    }


def diagnostics():
    """A model that takes whole batches."""
    model = Small()
    model.register_forward_pre_hook(lambda _, batches: batches[0]["input_ids"])
    names = with_optimizer(model)
    return {**plain(), **names, "loader": [rows(length=8) for _ in range(3)], "rate": 1e-3}


def huggingface():
    """A tiny model in the folder "gpt2", which `from_pretrained` takes for the name's checkpoint."""
    from transformers import TrainingArguments

    transformers_model().save_pretrained("gpt2")
    return {
        "arguments": TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[]),
        "dataset": dataset(),
    }


def lightning():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Small()

        def training_step(self, batch):
            return loss_fn(self.model(batch["input_ids"]), batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    warnings.simplefilter("ignore")
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {
        "Module": Module,
        "torch": torch,
        "module": Module(),
        "loader": DataLoader(dataset(), batch_size=2),
        "max_steps": 2,
        "max_epochs": 1,
        "other_arguments": {"accelerator": "cpu", **dict.fromkeys(quiet, False)},
    }


def models():
    from seqwarm_kernels import apply_alibi

    model = transformers_model()
    model.save_pretrained("gpt2")
    apply_alibi(model, max_seq_length=64)
    model.save_pretrained("alibi")
    modules = {name: type(name, (nn.Module,), {"num_heads": 2}) for name in ("MyAttention", "MyPositionalEncoding")}
    return {"folder": "alibi", "nn": nn, **modules}


def attn_implementation():
    """A tiny Llama in the folder that stands in for the checkpoint of the page."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    llama.save_pretrained("HuggingFaceTB/SmolLM2-135M")
    return {}


def many_devices():
    """A group of one rank. tests/docs/test_code_blocks.py ends it."""
    from ..support.ranks import free_port, join_group

    join_group(0, free_port(), world_size=1)
    return {**queries(), "world_size": 1, "torch": torch}


def batching():
    return {
        "torch": torch,
        "dataset": [{"input_ids": list(range(1, 2 + i % 30))} for i in range(100)],
        "model": lambda **batch: batch["input_ids"].sum(),
    }


def text_files():
    folder = Path("my_corpus")
    folder.mkdir()
    (folder / "text.txt").write_text("Sequences are short at first.\nThey grow to the full length.\n" * 3)
    return {"tokenizer": lambda text: SimpleNamespace(input_ids=list(text.encode()))}


def data_sources():
    """The file of tokens of the page."""
    from ..data.token_files import documents

    made = documents(500, longest=58)
    for document in made:
        document[-1] = 50_256
    np.concatenate(made).tofile("train.bin")
    return {}


def tuning():
    return {
        "build": lambda: (None, None),
        "validate": lambda model: 10.0,
        "train_step": lambda model, optimizer, batch: None,
        "next_batch": lambda: {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
    }


def tokens_and_labels():
    return {"tokens": rows()["input_ids"], "labels": rows()["labels"]}


#: Pages that are not here need no names.
NAMES = {
    "README.md": readme,
    "docs/guides/plain_loop.md": plain,
    "docs/guides/huggingface.md": huggingface,
    "docs/guides/lightning.md": lightning,
    "docs/guides/models.md": models,
    "docs/guides/attn_implementation.md": attn_implementation,
    "docs/guides/many_devices.md": many_devices,
    "docs/guides/batching.md": batching,
    "docs/guides/text_files.md": text_files,
    "docs/guides/data_sources.md": data_sources,
    "docs/guides/diagnostics.md": diagnostics,
    "docs/guides/tuning.md": tuning,
    "docs/concepts/allocator.md": tokens_and_labels,
    "docs/help/from_deepspeed.md": tokens_and_labels,
}
