"""The settings of a run and the model they describe."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqwarm_kernels as sw

Batch = dict[str, Tensor]  # {"input_ids": (B, S) int64, "labels": (B, S) int64}
Attention = Callable[..., Tensor]  # query, key, value (B, H, S, D), slopes (H,), causal=bool -> (B, H, S, D)


class UserError(ValueError):
    """The flags or the text are invalid. The message is complete: no traceback is needed."""


SIZES = {
    "toy": {"layers": 3, "heads": 4, "width": 128, "total_tokens": 1_500_000, "learning_rate": 4e-3, "vocab_size": 1024,
            "seq_length": 256, "min_seq_length": 32, "batch_size": 16, "lr_warmup_steps": 20, "precision": "fp32",
            "validation_tokens": 2**14},
    "52m": {"layers": 8, "heads": 8, "width": 512, "total_tokens": 1_000_000_000, "learning_rate": 1e-3,
            "batch_size": 128, "micro_batch_size": 32},
    "125m": {"layers": 12, "heads": 12, "width": 768, "total_tokens": 2_500_000_000, "learning_rate": 6e-4},
    "350m": {"layers": 24, "heads": 16, "width": 1024, "total_tokens": 7_000_000_000, "learning_rate": 3e-4},
    "760m": {"layers": 24, "heads": 16, "width": 1536, "total_tokens": 15_000_000_000, "learning_rate": 2.5e-4,
             "micro_batch_size": 8},
    "1.5b": {"layers": 48, "heads": 25, "width": 1600, "total_tokens": 30_000_000_000, "learning_rate": 2e-4,
             "micro_batch_size": 8},
}  # fmt: skip


def number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """A converter for argparse that also checks the range."""

    def checked(text: str) -> Any:
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {text}")
        return kind(text)

    checked.__name__ = kind.__name__  # argparse names the type in its message about invalid numbers
    return checked


AT_LEAST_ONE, NOT_NEGATIVE, SHARE = number(int, 1), number(float, 0), number(float, 0, 1)


def flag(text: str, default: Any = None, *, shown: Any = None, **options: Any) -> Any:
    shown = default if shown is None else shown
    help_text = text if shown in (None, False) else f"{text} (default: {shown})"
    return dataclasses.field(default=default, metadata={"help": help_text, "default": argparse.SUPPRESS, **options})


by_size = functools.partial(flag, shown="by size")


@dataclass(frozen=True)
class Config:
    """All settings that a run depends on. Each field with a help text is a flag."""

    size: str = flag("model size", "52m", choices=list(SIZES))
    text: Sequence[str] | None = flag(
        "files and folders, also .gz and .zst; a file is one document, a long file several", nargs="+"
    )
    dataset: str | None = flag("instead of --text: NAME or NAME:CONFIG of Hugging Face; a row is one document")
    dataset_column: str = flag("column with the text", "text")
    tokenizer: str | None = flag("JSON file of the package tokenizers", shown="train a byte-level BPE")
    vocab_size: int = by_size("size of that BPE", 50_257, type=number(int, 258))  # 256 bytes, END_OF_TEXT, MASK
    seq_length: int = by_size("full sequence length", 1024, type=AT_LEAST_ONE)
    batch_size: int = by_size("sequences in an optimizer step, over all ranks", 512, type=AT_LEAST_ONE)
    micro_batch_size: int = by_size("rows per forward pass at full length; more if shorter", 16, type=AT_LEAST_ONE)
    total_tokens: int = by_size("tokens to train on", 0, type=AT_LEAST_ONE)
    learning_rate: float = by_size("peak learning rate", 0.0, type=NOT_NEGATIVE)
    lr_warmup_steps: int = by_size("optimizer steps until the peak", 500, type=AT_LEAST_ONE)
    weight_decay: float = flag("weight decay of matrices", 0.1, type=NOT_NEGATIVE)
    max_grad_norm: float = flag("gradients are clipped to this norm; 0 turns clipping off", 1.0, type=NOT_NEGATIVE)
    warmup_duration: float = flag("share of all tokens until the full length; 0: no warmup", 0.3, type=SHARE)
    min_seq_length: int = by_size("sequence length at the start", 64, type=AT_LEAST_ONE)
    step_size: int = flag("lengths grow in multiples of this number", 8, type=AT_LEAST_ONE)
    mode: str = flag(
        "truncate: short rows; flatten: more rows while they are short, and segments: full rows of short segments, so "
        "that every step has the tokens of one at full length",
        "truncate",
        choices=["truncate", "flatten", "segments"],
    )
    scale_learning_rate: bool = flag(
        "with --mode flatten: multiply the learning rate by the square root of rows over rows at full length",
        False,
        action="store_true",
    )
    objective: str = flag("causal: predict the next token; masked: as BERT", "causal", choices=["causal", "masked"])
    precision: str = by_size("of matmuls and attention; with fsdp2 of all layers", "bf16", choices=["bf16", "fp32"])
    validation_lengths: Sequence[int] | None = flag("in tokens", shown="full length", type=AT_LEAST_ONE, nargs="+")
    validation_tokens: int = by_size("tokens to validate on, the same at every length", 2**20, type=AT_LEAST_ONE)
    validate_every: float = flag("share of all tokens between validations; each saves a checkpoint", 0.05, type=SHARE)
    validation_share: float = flag("share of the text to validate on, in whole documents", 0.05, type=SHARE)
    seed: int = flag("seed of weights and batches", 0, type=number(int, 0))
    parallel: str = flag("parallelism under torchrun", "ddp", choices=["ddp", "fsdp2"])
    tensor_parallel: int = flag("ranks that share the heads of a layer, and its MLP", 1, type=AT_LEAST_ONE)
    context_parallel: int = flag("ranks that share the tokens of each row, under torchrun", 1, type=AT_LEAST_ONE)
    compile: bool = flag("apply torch.compile to each block", False, action="store_true")
    device: str = flag("device", "cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    monitor_every: int = flag("steps between two reads of loss and monitors", 20, type=AT_LEAST_ONE)
    layers: int = 0
    heads: int = 0
    width: int = 0
    entries: int = 0  # largest token id plus one, known once there is a tokenizer
    tokens: str = ""  # name of the folder in the cache


def parse(arguments: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """Only the flags that were given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the run", type=Path, required=True)
    parser.add_argument("--cache", help="folder of tokens, shared between runs (default: OUT/tokens)", type=Path)
    parser.add_argument("--resume", help="continue the run in OUT, or start it if there is none", action="store_true")
    for entry in dataclasses.fields(Config):
        if entry.metadata:
            parser.add_argument("--" + entry.name.replace("_", "-"), **entry.metadata)
    return parser.parse_args(arguments)


def configure(given: argparse.Namespace) -> Config:
    """The configuration from the flags, or that of the run to resume."""
    flags = {name: value for name, value in vars(given).items() if name not in ("out", "cache", "resume")}
    if not (given.out / "checkpoint.pt").exists() and not has_diverged(read_records(given.out)):
        if ("text" in flags) == ("dataset" in flags):
            raise UserError("either --text or --dataset must be given, and not both")
        config = Config(**{**SIZES[flags.get("size", Config.size)], **flags})
        least, most = config.min_seq_length, config.seq_length
        if "min_seq_length" in flags and least > most:
            raise UserError(f"min_seq_length must be at most seq_length {most}, got {least}")
        if config.scale_learning_rate and config.mode != "flatten":
            raise UserError("scale_learning_rate needs --mode flatten: otherwise every step has the same rows")
        if config.heads % config.tensor_parallel:
            raise UserError(f"tensor_parallel must divide the {config.heads} heads, got {config.tensor_parallel}")
        return dataclasses.replace(config, min_seq_length=min(least, most))
    if not given.resume:
        raise UserError(f"{given.out} holds a run: add --resume to continue it, or name another folder as --out")
    config = read_config(given.out)
    for name, value in flags.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} must stay {getattr(config, name)!r}, as in {given.out}, got {value!r}")
    return config


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors in this block name the file of the run that is being read."""
    try:
        yield
    except (AttributeError, EOFError, KeyError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        raise UserError(
            f"{path} is damaged, or was written by another version of this script: {type(error).__name__}: {error}"
        ) from error


def read_records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    if not path.exists():
        return []
    with reading(path):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        has_diverged(records)
        return records


def has_diverged(records: list[dict[str, Any]]) -> bool:
    return bool(records) and records[-1]["diverged"]


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    with reading(path):
        return Config(**json.loads(path.read_text()))


class GPT(nn.Module):
    """GPT-2 with ALiBi instead of position embeddings. Pre-norm; input and output embeddings are tied.

    input_ids (B, S) int64 -> logits (B, S, V), where V is the vocabulary padded to a multiple of 64 for tensor cores.
    """

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(-(-config.entries // 64) * 64, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # as GPT-2: the scale of the residual stream does not grow with the layers
                is_residual = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, segment_length: int | None = None) -> Tensor:
        hidden = self.embedding(input_ids)
        limits = {} if segment_length is None else {"segment_length": segment_length}
        for block in self.blocks:
            hidden = block(hidden, **limits)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    slopes: Tensor

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.heads, self.is_causal, self.attention = config.heads, config.objective == "causal", attention
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads_projection, self.attention_project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_expand, self.mlp_project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("slopes", sw.alibi_slopes(config.heads), persistent=False)

    def forward(self, hidden: Tensor, **limits: int) -> Tensor:
        # Heads come first in the projection, so that a part of its rows is a part of the heads.
        heads = self.heads_projection(self.attention_norm(hidden)).unflatten(-1, (self.heads, 3, -1))
        query, key, value = heads.permute(3, 0, 2, 1, 4)  # views, each (B, H, S, D)
        attended = self.attention(query, key, value, self.slopes, causal=self.is_causal, **limits)
        hidden = hidden + self.attention_project(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp_project(F.gelu(self.mlp_expand(self.mlp_norm(hidden)), approximate="tanh"))


def build_model(config: Config, attention: Attention | None = None) -> GPT:
    """The model on the CPU. Equal seeds give equal weights.

    Args:
        attention: attention(query, key, value, slopes, *, causal) -> out, all (B, H, S, D), slopes (H,) float32.
            Default: `seqwarm_kernels.alibi_attention`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return GPT(config, attention or sw.alibi_attention)


def loss_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over all labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")
