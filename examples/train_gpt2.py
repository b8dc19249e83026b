"""Train a GPT-2 with ALiBi and sequence-length warmup, from text files to checkpoints that resume bit for bit.

    python examples/train_gpt2.py --text my_corpus/ --out runs/first
    torchrun --nproc-per-node 8 examples/train_gpt2.py --size 1.5b --parallel fsdp2 --text my_corpus/ --out runs/large
    python examples/train_gpt2.py --size toy --text my_corpus/ --out runs/toy    # a minute on two CPU cores

A run that was killed goes on with the same command and --resume. Its folder, which all nodes share, holds config.json,
tokenizer.json, tokens/, records.jsonl (a line at each validation), monitor.jsonl (a line at each step), checkpoint.pt
(with --parallel fsdp2 also checkpoint-STEP/), and in the end model.pt. Exit status 2: flags or text will not do;
3: the loss was not finite any more (1 under torchrun, in both cases).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

import seqwarm_kernels as sw
from seqwarm_kernels.allocator.memory import memory_of
from seqwarm_kernels.data.files.compression import READ_ERRORS, read_uncompressed
from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor
from seqwarm_kernels.utils.files import PARTIAL_SUFFIX, open_atomically, partial_of, sync_folder, write_atomically

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1  # of the peak
MASKED_SHARE = 0.15  # as BERT: of these, 80 % become the mask token, 10 % any other but special ones, 10 % stay
END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
TOKENIZER_DOCUMENTS = 1_000_000  # that a tokenizer is trained on, at most
DOCUMENTS_AT_ONCE = 256  # to tokenise, in parallel
LONGEST_DOCUMENT = 2**18  # characters of a file in a folder that comes whole
LINES_IN_A_PIECE = 256  # of a longer one, or one that is no part of a folder
IGNORED = -100  # a label that does not count
TOKENS_VERSION = 3  # of the way from text to tokens, which a cache must not mix up
REFUSED, DIVERGED = 2, 3  # exit status

Batch = dict[str, Tensor]  # {"input_ids": (B, S) int64, "labels": (B, S) int64}
Attend = Callable[..., Tensor]  # query, key, value (B, H, S, D), slopes (H,), causal=bool -> (B, H, S, D)

tell_once = functools.cache(tqdm.write)  # the text is read three times


class UserError(ValueError):
    """Flags or a text that will not do; its message says all."""


# ---- Settings


def sized(
    layers: int, heads: int, width: int, total_tokens: int, learning_rate: float, **others: Any
) -> dict[str, Any]:
    """What a model's size sets where no flag does."""
    usual = {"vocab_size": 50_257, "seq_length": 1024, "min_seq_length": 64, "batch_size": 512, "micro_batch_size": 16,
             "lr_warmup_steps": 500, "precision": "bf16", "validation_tokens": 2**20}  # fmt: skip
    named = {"layers": layers, "heads": heads, "width": width, "total_tokens": total_tokens}
    return {**usual, **named, "learning_rate": learning_rate, **others}


SIZES = {
    "toy": sized(3, 4, 128, 1_500_000, 4e-3, vocab_size=1024, seq_length=256, min_seq_length=32, batch_size=16,
                 lr_warmup_steps=20, precision="fp32", validation_tokens=2**14),
    "52m": sized(8, 8, 512, 1_000_000_000, 1e-3, batch_size=128, micro_batch_size=32),
    "125m": sized(12, 12, 768, 2_500_000_000, 6e-4),
    "350m": sized(24, 16, 1024, 7_000_000_000, 3e-4),
    "760m": sized(24, 16, 1536, 15_000_000_000, 2.5e-4, micro_batch_size=8),
    "1.5b": sized(48, 25, 1600, 30_000_000_000, 2e-4, micro_batch_size=8),
}  # fmt: skip


def number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {text}")
        return kind(text)

    checked.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return checked


AT_LEAST_ONE, NOT_NEGATIVE, SHARE = number(int, 1), number(float, 0), number(float, 0, 1)


def flag(text: str, default: Any = None, **options: Any) -> Any:
    shown = text if default in (None, False) else f"{text} (default: {default})"
    return dataclasses.field(default=default, metadata={"help": shown, "default": argparse.SUPPRESS, **options})


@dataclass(frozen=True)
class Config:
    """All that a run depends on. The flags are its fields."""

    size: str = flag("of the model; sets those without a default here", "52m", choices=list(SIZES))
    text: Sequence[str] | None = flag(
        "files and folders, also .gz and .zst; a file is a document, if it is not long", nargs="+"
    )
    dataset: str | None = flag("in place of text: NAME or NAME:CONFIG of Hugging Face; a row is a document")
    dataset_column: str = flag("the column with the text", "text")
    tokenizer: str | None = flag("a JSON file of the package tokenizers; without one a byte-level BPE is trained")
    vocab_size: int = flag("entries of that BPE, at most", type=number(int, 258))  # bytes, END_OF_TEXT, MASK
    seq_length: int = flag("tokens in a sequence in the end", type=AT_LEAST_ONE)
    batch_size: int = flag("sequences in an optimizer step, over all ranks", type=AT_LEAST_ONE)
    micro_batch_size: int = flag("full sequences in a rank's forward pass; more while short", type=AT_LEAST_ONE)
    total_tokens: int = flag("to train on", type=AT_LEAST_ONE)
    learning_rate: float = flag("at its peak", type=NOT_NEGATIVE)
    lr_warmup_steps: int = flag("optimizer steps until the peak", type=AT_LEAST_ONE)
    weight_decay: float = flag("of matrices", 0.1, type=NOT_NEGATIVE)
    max_grad_norm: float = flag("gradients are clipped to this norm; 0: they are not", 1.0, type=NOT_NEGATIVE)
    warmup_duration: float = flag("share of all tokens until sequences are full; 0: no warmup", 0.3, type=SHARE)
    min_seq_length: int = flag("tokens in a sequence at the start", type=AT_LEAST_ONE)
    step_size: int = flag("lengths grow in multiples of this", 8, type=AT_LEAST_ONE)
    objective: str = flag("the next token, or masked tokens as BERT", "causal", choices=["causal", "masked"])
    precision: str = flag("of products and attention; with fsdp2 between them, too", choices=["bf16", "fp32"])
    validation_lengths: Sequence[int] | None = flag("(default: the sequence length)", type=AT_LEAST_ONE, nargs="+")
    validation_tokens: int = flag("to validate on, the same at every length", type=AT_LEAST_ONE)
    validate_every: float = flag("share of all tokens between two validations; each has a checkpoint", 0.05, type=SHARE)
    validation_share: float = flag("of the text, in whole documents", 0.05, type=SHARE)
    seed: int = flag("of weights and batches", 0, type=number(int, 0))
    parallel: str = flag("under torchrun", "ddp", choices=["ddp", "fsdp2"])
    compile: bool = flag("torch.compile each block", False, action="store_true")
    device: str = flag("to train on", "cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    monitor_every: int = flag("steps between two looks at loss and monitors", 20, type=AT_LEAST_ONE)
    layers: int = 0
    heads: int = 0
    width: int = 0
    entries: int = 0  # of the tokenizer that there is
    tokens: str = ""  # the folder in the cache


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Only what was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the run", type=Path, required=True)
    parser.add_argument("--cache", help="folder of tokens, for runs to share (default: OUT/tokens)", type=Path)
    parser.add_argument("--resume", help="continue OUT, or begin it if there is none", action="store_true")
    for entry in dataclasses.fields(Config):
        if entry.metadata:
            parser.add_argument("--" + entry.name.replace("_", "-"), **entry.metadata)
    return parser.parse_args(arguments)


def configure(given: argparse.Namespace) -> Config:
    """Of the flags, or of the run in OUT that is to be resumed."""
    flags = {name: value for name, value in vars(given).items() if name not in ("out", "cache", "resume")}
    if not (given.out / "checkpoint.pt").exists() and not has_diverged(read_records(given.out)):
        if ("text" in flags) == ("dataset" in flags):
            raise UserError("--text or --dataset must be given, and not both")
        usual = SIZES[flags.get("size", Config.size)]
        settings = {**usual, **flags}
        most = settings["seq_length"]
        settings["min_seq_length"] = flags.get("min_seq_length", min(usual["min_seq_length"], most))
        if settings["min_seq_length"] > most:
            raise UserError(f"min_seq_length must be at most seq_length {most}, got {settings['min_seq_length']}")
        return Config(**settings)
    if not given.resume:
        raise UserError(f"{given.out} holds a run: add --resume to continue it, or name another folder as --out")
    config = read_config(given.out)
    for name, value in flags.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} must stay {getattr(config, name)!r}, as in {given.out}, got {value!r}")
    return config


def read_records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_diverged(records: list[dict[str, Any]]) -> bool:
    return bool(records) and records[-1]["diverged"]


def read_config(folder: Path) -> Config:
    return Config(**json.loads((folder / "config.json").read_text()))


# ---- Model


class GPT(nn.Module):
    """GPT-2 with ALiBi in place of position embeddings: pre-norm, input and output embedding tied.

    input_ids (B, S) int64 -> logits (B, S, vocabulary, padded to a multiple of 64 for the matrix units)
    """

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(-(-config.entries // 64) * 64, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # as GPT-2: the sum over all layers keeps its scale
                is_residual = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    slopes: Tensor

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        width = config.width
        self.heads, self.is_causal, self.attend = config.heads, config.objective == "causal", attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attention_project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_expand, self.mlp_project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("slopes", sw.alibi_slopes(config.heads), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D), as views
        attended = self.attend(query, key, value, self.slopes, causal=self.is_causal)
        hidden = hidden + self.attention_project(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp_project(F.gelu(self.mlp_expand(self.mlp_norm(hidden)), approximate="tanh"))


def build_model(config: Config, attend: Attend | None = None) -> GPT:
    """On the CPU, the same weights for the same seed.

    Args:
        attend: attend(query, key, value, slopes, *, causal) -> out, all (B, H, S, D), slopes (H,) float32.
            Default: alibi_attention of this package.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return GPT(config, attend or sw.alibi_attention)


def loss_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over the labels that count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


# ---- Text to tokens, once for all runs on the same text


def documents(config: Config, title: str = "reading") -> Iterator[tuple[bytes, str]]:
    """Each with its digest, in the same order each time; equal ones once, so that training has none to validate on."""
    seen = set()
    texts = rows_of(config.dataset, config.dataset_column) if config.dataset else files_of(config.text or [])
    for text in tqdm(texts, desc=title, unit=" documents", leave=False):
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield digest, text


def files_of(paths: Sequence[str]) -> Iterator[str]:
    """What is no text is left out of folders, and told.

    A file named itself, and a long one in a folder, comes in pieces: it may be all there is, and some is held out.
    """
    for root in map(Path, paths):
        if root.is_dir():
            yield from files_below(root)
            continue
        yield from pieces_of(text_of(root))


def pieces_of(text: str) -> Iterator[str]:
    lines = iter(text.splitlines(keepends=True))
    while piece := "".join(itertools.islice(lines, LINES_IN_A_PIECE)):
        yield piece


def files_below(root: Path) -> Iterator[str]:
    left_out: list[Exception] = []
    paths = [Path(at, name) for at, _, names in os.walk(root, onerror=left_out.append) for name in names]
    for path in sorted(paths):
        if "/." not in f"/{path.relative_to(root).as_posix()}":
            try:
                text = text_of(path)
                yield from pieces_of(text) if len(text) > LONGEST_DOCUMENT else [text]
            except UserError as error:
                left_out.append(error)
    if left_out:
        tell_once(f"{root}: left out {len(left_out)} of {len(paths)} files; the first: {left_out[0]}")


def text_of(path: Path) -> str:
    try:
        if not path.is_file():
            raise UserError(f"text must name files and folders that exist, got {path}")
        text = read_uncompressed(path).decode()
    except (*READ_ERRORS, UnicodeDecodeError) as error:
        raise UserError(f"text must be whole and in UTF-8, got {path}: {type(error).__name__}: {error}") from error
    if "\0" in text:
        raise UserError(f"text must have no NUL, got {path}")
    return text


def rows_of(name: str, column: str) -> Iterator[str]:
    rows = package("datasets").load_dataset(*name.split(":"), split="train")
    if column not in rows.column_names:
        raise UserError(f"dataset_column must be one of {rows.column_names}, got {column!r}")
    for number, row in enumerate(rows):
        try:
            row[column].encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise UserError(
                f"dataset_column must be text, got row {number} of {column!r}: {row[column]!r:.60}"
            ) from error
        yield row[column]


def package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(f"this needs the package {name}: pip install {name}") from error


def prepare_tokens(config: Config, cache: Path) -> Config:
    """See that the cache has the folder of tokens that the result names."""
    if config.tokens and (cache / config.tokens).exists():
        return config
    sizes = {digest: len(text) for digest, text in documents(config)}
    tokenizer = load_tokenizer(Path(), config.tokenizer).to_str() if config.tokenizer else f"bpe {config.vocab_size}"
    settings = f"{tokenizer} {config.validation_share} {TOKENS_VERSION}"
    key = hashlib.sha256(b"".join(sizes) + settings.encode()).hexdigest()[:16]
    if config.tokens not in ("", key):
        raise UserError("text and tokenizer must be those that the run began with, got others")
    folder, partial = cache / key, partial_of(cache / key)
    if not folder.exists():
        partial.mkdir(parents=True)
        try:
            write_tokens(config, held_out(sizes, config.validation_share), partial)
            partial.rename(folder)
            sync_folder(cache)
        except OSError:
            if not folder.exists():  # no other run has made the same meanwhile
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    entries = 1 + max(load_tokenizer(folder).get_vocab().values())  # ids may have holes
    return dataclasses.replace(config, tokens=key, entries=entries)


def held_out(sizes: dict[bytes, int], share: float) -> set[bytes]:
    """Documents to validate on: by their digest, those that fit into this share of the text, or else the smallest."""
    if len(sizes) < 2:
        raise UserError(f"text must have two documents at least, one to validate on, got {len(sizes)}")
    chosen, room = set(), share * sum(sizes.values())
    for digest in sorted(sizes)[:-1]:  # one is left to train on
        if sizes[digest] <= room:
            chosen.add(digest)
            room -= sizes[digest]
    return chosen or {min(sizes, key=lambda digest: (sizes[digest], digest))}


def write_tokens(config: Config, validation: set[bytes], folder: Path) -> None:
    to_train = (text for digest, text in documents(config, "tokenizer") if digest not in validation)
    tokenizer = make_tokenizer(config, to_train)
    tokenizer.encode_special_tokens = True  # where the text has such words, they are words
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
    with open(folder / "training", "wb") as training, open(folder / "validation", "wb") as held_out:
        remaining = documents(config, "tokenising")
        while some := list(itertools.islice(remaining, DOCUMENTS_AT_ONCE)):
            encodings = tokenizer.encode_batch([text for _, text in some], add_special_tokens=False)  # in parallel
            for (digest, _), encoding in zip(some, encodings, strict=True):
                tokens = np.array([*encoding.ids, end], dtype)
                tokens.tofile(held_out if digest in validation else training)
    for part in (folder / "training", folder / "validation"):
        with open(part.with_suffix(".npy"), "xb") as file:
            np.save(file, np.memmap(part, dtype, mode="r"))
            file.flush()
            os.fsync(file.fileno())
        part.unlink()
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())


def make_tokenizer(config: Config, texts: Iterable[str]) -> Any:
    tokenizers = package("tokenizers")
    if config.tokenizer:
        tokenizer = load_tokenizer(Path(), config.tokenizer)
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=config.vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT, MASK], initial_alphabet=alphabet
        )
        tokenizer.train_from_iterator(itertools.islice(texts, TOKENIZER_DOCUMENTS), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT, MASK])  # where it has not got them
    vocabulary = tokenizer.get_vocab()
    if len(set(vocabulary.values())) < len(vocabulary):  # ids are given by counting
        raise UserError(f"tokenizer must have ids without holes, or {END_OF_TEXT} and {MASK}, got {config.tokenizer}")
    return tokenizer


def load_tokenizer(folder: Path, name: str = "tokenizer.json") -> Any:
    tokenizers = package("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / name))
    except Exception as error:  # the package has no other
        raise UserError(f"tokenizer must be a JSON file of the package tokenizers, got {name}: {error}") from error
    tokenizer.no_truncation()  # documents are whole, whatever it was saved with
    tokenizer.no_padding()
    return tokenizer


# ---- Tokens to batches


class Batches:
    """Windows at random places of the text: a function of seed and step, so that to resume needs no replay.

    Every number of ranks draws the same windows, and each rank takes its share of them. Masks to train on
    change with the number of ranks.
    """

    def __init__(self, config: Config, folder: Path, rank: int, world_size: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.lengths = config.validation_lengths or [config.seq_length]
        self.training = np.load(folder / "training.npy", mmap_mode="r")
        self.validation = np.load(folder / "validation.npy", mmap_mode="r")
        tokenizer = load_tokenizer(folder)
        self.mask_token, self.end_token = tokenizer.token_to_id(MASK), tokenizer.token_to_id(END_OF_TEXT)
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.ordinary = np.array(sorted(set(tokenizer.get_vocab().values()) - special))
        for tokens, length in ((self.training, config.seq_length), (self.validation, max(self.lengths))):
            if len(tokens) <= length:
                part = "train" if tokens is self.training else "validate"
                raise UserError(f"text must have more than {length} tokens to {part} on, got {len(tokens)}")

    def draw(self, step: int) -> Batch:
        """This rank's rows of the step's batch, at the full length."""
        length, seed = self.config.seq_length, self.config.seed
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(len(self.training) - length, size=self.config.batch_size)
        own = starts[self.rank :: self.world_size]
        windows = np.stack([self.training[start : start + length + 1] for start in own])
        return self.to_batch(windows, np.random.default_rng([seed, step, 1 + self.rank]))

    def to_validate(self, length: int) -> Batch:
        """This rank's rows of all validation windows; the same tokens for each length that divides the longest."""
        longest = max(self.lengths)
        total = max(1, min(self.config.validation_tokens, len(self.validation) - 1) // longest) * longest
        batch = self.to_batch(self.validation[None, : total // length * length + 1], np.random.default_rng(0))
        missing = -(total // length) % self.world_size  # every rank makes the same number of passes
        rows = {}
        for name, filler in (("input_ids", 0), ("labels", IGNORED)):
            padded = F.pad(batch[name].view(-1, length), (0, 0, 0, missing), value=filler)
            rows[name] = padded[self.rank :: self.world_size]
        return rows

    def to_batch(self, windows: np.ndarray, generator: np.random.Generator) -> Batch:
        tokens = torch.from_numpy(windows.astype(np.int64))
        if self.config.objective == "causal":
            return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        tokens = tokens[:, :-1].contiguous()
        dice = torch.from_numpy(generator.random(tokens.shape, dtype=np.float32)) / MASKED_SHARE
        dice[tokens == self.end_token] = 1  # stays, and is no label
        chance = torch.from_numpy(self.ordinary[generator.integers(len(self.ordinary), size=tokens.shape)])
        replaced = torch.where(dice < 0.8, self.mask_token, torch.where(dice < 0.9, chance, tokens))
        return {"input_ids": replaced, "labels": torch.where(dice < 1, tokens, IGNORED)}


# ---- Training


class Run:
    """Model, optimizer, schedule and counts. `train` goes to the end from where they stand."""

    def __init__(self, config: Config, out: Path, cache: Path, attend: Attend | None) -> None:
        self.config, self.out = config, out
        self.rank, self.world_size = rank_and_world_size()
        self.device = torch.device("cuda", local_rank()) if config.device == "cuda" else torch.device("cpu")
        self.memory = memory_of(self.device)
        self.rows, odd = divmod(config.batch_size, self.world_size)
        if odd:
            raise UserError(f"batch_size must be a multiple of the {self.world_size} ranks, got {config.batch_size}")
        self.batches = Batches(config, cache / config.tokens, self.rank, self.world_size)
        self.model = build_model(config, attend).to(self.device)
        self.parallel = self.parallelise()  # what is called in training
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim != 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)
        self.scheduler = sw.SequenceLengthScheduler(
            config.min_seq_length,
            config.seq_length,
            duration=config.warmup_duration * config.total_tokens,
            step_size=config.step_size,
            unit="token",
        )
        outputs = [JsonLines(out / "monitor.jsonl")] if self.rank == 0 else []
        self.monitor = TrainingMonitor(self.optimizer, *outputs, read_every=config.monitor_every)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.seq_length = self.scheduler.seq_length  # of the last step
        self.records: list[dict[str, Any]] = []

    def parallelise(self) -> nn.Module:
        if self.config.compile:
            for block in self.model.blocks:
                block.compile()
        if self.config.parallel == "fsdp2":
            if not distributed.is_initialized():
                raise UserError("--parallel fsdp2 needs torchrun: torchrun --nproc-per-node N ...")
            mesh = init_device_mesh(self.config.device, (self.world_size,))
            dtype = torch.bfloat16 if self.config.precision == "bf16" else None
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for module in [*self.model.blocks, self.model]:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        elif self.world_size > 1:
            return DistributedDataParallel(self.model, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self.model

    def train(self) -> list[dict[str, Any]]:
        """The records of the whole run; a checkpoint is there for each."""
        if not self.is_finished():
            self.claim_memory()
        total = self.config.total_tokens
        bar = tqdm(total=total, initial=self.tokens, unit=" tokens", unit_scale=True, disable=self.rank > 0)
        with bar, self.monitor:
            while not self.is_finished():
                self.records.append(self.train_and_validate(bar))
                self.save()
                if self.rank == 0:
                    bar.write(describe(self.records[-1]))
        if not has_diverged(self.records):
            self.export()
        return self.records

    def is_finished(self) -> bool:
        return has_diverged(self.records) or self.tokens >= self.config.total_tokens

    def claim_memory(self) -> None:
        """Allocate, and compile, before the first step: each length, with the rows of its full passes."""
        lengths = sorted({milestone.seq_length for milestone in self.scheduler.milestones()}, reverse=True)
        example = {name: tensor[:1] for name, tensor in self.batches.draw(0).items()}
        for rows, alike in itertools.groupby(lengths, self.rows_of_a_pass):
            longest, *_, shortest = [*alike] * 2  # a single length is both
            report = sw.warmup_allocator(
                self.parallel,
                longest,
                batch_size=rows,
                example_batch=example,
                loss_fn=loss_sum,
                optimizer=self.optimizer,
                autocast_dtype=torch.bfloat16 if self.config.precision == "bf16" else None,
                max_grad_norm=self.config.max_grad_norm or None,
                accumulation_steps=1 if rows == self.rows else 2,
                scheduler=sw.SequenceLengthScheduler(
                    shortest, longest, duration=longest - shortest, step_size=self.config.step_size
                ),
                raise_out_of_memory=True,
            )
            if self.rank == 0:
                print(report)

    def rows_of_a_pass(self, length: int) -> int:
        """As many tokens at each length, as far as the batch goes."""
        return min(self.rows, self.config.micro_batch_size * (self.config.seq_length // length))

    def train_and_validate(self, bar: tqdm[Any]) -> dict[str, Any]:
        """To the next validation. The clock runs while it trains."""
        seconds, tokens = self.seconds, self.tokens
        interval = math.ceil(self.config.validate_every * self.config.total_tokens) or self.config.total_tokens
        self.memory.reset_peak()
        train_loss = self.train_until(min(self.config.total_tokens, (tokens // interval + 1) * interval), bar)
        record = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "seq_length": self.seq_length,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": None,
            "validation_loss": {},
            "tokens_per_second": (self.tokens - tokens) / (self.seconds - seconds),
            "peak_memory_bytes": self.memory.peak(),
            "diverged": True,
        }
        losses = self.validate() if math.isfinite(train_loss) else {}
        if math.isfinite(train_loss) and all(map(math.isfinite, losses.values())):
            record.update(train_loss=train_loss, validation_loss=losses, diverged=False)
        return record

    def train_until(self, tokens: int, bar: tqdm[Any]) -> float:
        """The mean loss since; the way ends early where a look at it, now and then, finds it not finite."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, labels
        self.memory.synchronize()
        begun = time.perf_counter()
        while self.tokens < tokens:
            loss, labels, trained = self.train_step()
            sums += torch.stack([loss * labels, labels])
            bar.update(trained)
            if self.step % self.config.monitor_every == 0:  # a look waits for the device
                bar.set_postfix(loss=f"{loss.item():.3f}", length=self.seq_length, refresh=False)
                if not math.isfinite(sums[0].item()):
                    break
        self.memory.synchronize()
        self.seconds += time.perf_counter() - begun
        return (sums[0] / sums[1]).item()

    def train_step(self) -> tuple[Tensor, Tensor, int]:
        """One optimizer step at the length of now: its mean loss, its labels, and its tokens, over all ranks."""
        self.seq_length = self.scheduler.seq_length
        batch = self.scheduler.resize(self.batches.draw(self.step))
        count = torch.full((), int((batch["labels"] != IGNORED).sum()), device=self.device)
        labels = self.sum_over_ranks(count).clamp(min=1)
        rows = self.rows_of_a_pass(self.seq_length)
        loss = torch.zeros((), device=self.device)
        for begin in range(0, self.rows, rows):
            part = self.to_device({name: tensor[begin : begin + rows] for name, tensor in batch.items()})
            with self.exchange_gradients(begin + rows >= self.rows):
                with self.autocast():
                    part_loss = loss_sum(self.parallel(part["input_ids"]), part) * self.world_size / labels
                part_loss.backward()
            loss += part_loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf)
        rate = learning_rate(self.step, self.tokens, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss = self.sum_over_ranks(loss) / self.world_size
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self.monitor.observe(loss, grad_norm, learning_rate=rate, seq_length=self.seq_length)
        self.optimizer.zero_grad()
        tokens = batch["input_ids"].numel() * self.world_size
        self.scheduler.step(tokens)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        return loss, labels, tokens

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean loss at each validation length."""
        losses = {}
        for length in self.batches.lengths:
            batch = self.batches.to_validate(length)
            rows = max(1, self.config.micro_batch_size * self.config.seq_length // length)
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for begin in range(0, len(batch["labels"]), rows):
                part = self.to_device({name: tensor[begin : begin + rows] for name, tensor in batch.items()})
                with self.autocast():
                    loss = loss_sum(self.model(part["input_ids"]), part)
                total += torch.stack([loss, (part["labels"] != IGNORED).sum()])
            loss, labels = self.sum_over_ranks(total).tolist()
            losses[str(length)] = loss / max(1, labels)
        return losses

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def exchange_gradients(self, is_last: bool) -> AbstractContextManager[Any]:
        """Between ranks, once in a step: with its last micro batch."""
        if isinstance(self.parallel, FSDPModule):
            self.parallel.set_requires_gradient_sync(is_last)
        elif isinstance(self.parallel, DistributedDataParallel) and not is_last:
            return self.parallel.no_sync()
        return nullcontext()

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()}

    # Checkpoints: checkpoint.pt is replaced as a whole, and names the folder of the shards where there are such.

    def save(self) -> None:
        if not has_diverged(self.records):
            self.save_checkpoint()
        self.save_records()

    def save_records(self) -> None:
        if self.rank == 0:
            lines = [json.dumps(record) + "\n" for record in self.records]
            write_atomically(self.out / "records.jsonl", "".join(lines).encode())

    def save_checkpoint(self) -> None:
        self.monitor.flush()
        state = {
            "counts": [self.step, self.tokens, self.seconds],
            "records": self.records,
            "scheduler": self.scheduler.state_dict(),
            "monitor": self.monitor.state_dict(),
            "weights": self.weights(),
        }
        shards = self.out / f"checkpoint-{self.step}"
        if isinstance(self.parallel, FSDPModule):
            checkpoint.save(state["weights"], checkpoint_id=shards)
            state["weights"] = shards.name
        if self.rank == 0:
            save_atomically(state, self.out / "checkpoint.pt")
            for folder in self.out.glob("checkpoint-*"):
                if folder != shards:
                    shutil.rmtree(folder)

    def weights(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self) -> None:
        """Go on from the checkpoint, if there is one; a run that diverged has ended."""
        recorded = read_records(self.out)
        if has_diverged(recorded):
            self.records = recorded
            if self.rank == 0:
                print(f"{self.out} has ended: {describe(recorded[-1])}")
            return
        if not (self.out / "checkpoint.pt").exists():
            return
        state = torch.load(self.out / "checkpoint.pt", map_location="cpu", weights_only=True)
        weights = state["weights"]
        if isinstance(weights, str):
            shards, weights = self.out / weights, self.weights()
            checkpoint.load(weights, checkpoint_id=shards)
        states.set_state_dict(
            self.model, self.optimizer, model_state_dict=weights["model"], optim_state_dict=weights["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.monitor.load_state_dict(state["monitor"])
        self.step, self.tokens, self.seconds = state["counts"]
        self.records = state["records"]
        self.save_records()  # a run that was killed may not have come so far

    def export(self) -> None:
        """model.pt: the weights alone, whole."""
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            save_atomically(weights, self.out / "model.pt")


def learning_rate(step: int, tokens: int, config: Config) -> float:
    """A linear warmup by steps, times a cosine by tokens.

    Short steps hold few tokens: a decay by steps would have fallen far before the model has seen its share of the text
    (Li, Zhang and He, arXiv 2108.06084, appendix A.2), and a warmup by tokens would take many more steps than it has to
    (DeepSpeed's tutorial on curriculum learning, section 2.5: "unnecessary and harmful").
    """
    cosine = (1 + math.cos(math.pi * tokens / config.total_tokens)) / 2
    warmup = min(1.0, (step + 1) / config.lr_warmup_steps)
    return config.learning_rate * warmup * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def save_atomically(state: Any, path: Path) -> None:
    """As write_atomically, without a second copy in memory; clears away what killed runs left."""
    for left in path.parent.glob(f"{path.name}.*{PARTIAL_SUFFIX}"):
        left.unlink()
    with open_atomically(path) as file:
        torch.save(state, file)


def describe(record: dict[str, Any]) -> str:
    losses = "  ".join(f"{length}: {loss:.4f}" for length, loss in record["validation_loss"].items())
    return (
        f"step {record['step']:>7,}  {record['tokens']:>14,} tokens  {record['seconds']:>9.1f} s  length "
        f"{record['seq_length']:>5}  {'the loss is not finite' if record['diverged'] else f'validation loss {losses}'}"
    )


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def rank_and_world_size() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def load_run(folder: str | Path, *, attend: Attend | None = None) -> tuple[GPT, Any, Config]:
    """Model, tokenizer and configuration of a finished run; the model on the CPU, to evaluate."""
    config = read_config(Path(folder))
    model = build_model(config, attend)
    model.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
    return model.eval(), load_tokenizer(Path(folder)), config


def main(arguments: list[str] | None = None, *, attend: Attend | None = None) -> list[dict[str, Any]]:
    """Train, or go on; the records of all validations. `attend` as for `build_model`."""
    given = parse(arguments)
    config = configure(given)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank())
        torch.set_float32_matmul_precision("high")  # TF32, where the precision is fp32
    begins = "WORLD_SIZE" in os.environ and not distributed.is_initialized()
    if begins:  # with patience: rank 0 makes the tokens, the others wait
        distributed.init_process_group("nccl" if config.device == "cuda" else "gloo", timeout=timedelta(hours=4))
    try:
        return run(config, given.out, given.cache or given.out / "tokens", attend)
    finally:
        if begins:
            gc.collect()  # what wraps the model must not outlive the group
            distributed.destroy_process_group()


def run(config: Config, out: Path, cache: Path, attend: Attend | None) -> list[dict[str, Any]]:
    rank, world_size = rank_and_world_size()
    prepared = [prepare_tokens(config, cache) if rank == 0 else config]
    if world_size > 1:
        distributed.broadcast_object_list(prepared)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "tokenizer.json", (cache / prepared[0].tokens / "tokenizer.json").read_bytes())
        write_atomically(out / "config.json", json.dumps(dataclasses.asdict(prepared[0]), indent=2).encode())
    training = Run(prepared[0], out, cache, attend)
    training.load()
    return training.train()


if __name__ == "__main__":
    try:
        sys.exit(DIVERGED if has_diverged(main()) else 0)
    except UserError as refused:
        print(f"{Path(__file__).name}: {refused}", file=sys.stderr)
        sys.exit(REFUSED)
