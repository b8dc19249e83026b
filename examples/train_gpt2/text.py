"""Text to tokens to batches. Runs on the same text share its tokens."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from model import Batch, Config, UserError
from tqdm.auto import tqdm

from seqwarm_kernels.data import read_uncompressed, visible_files

MASKED_SHARE = 0.15  # as BERT: of these, 80 % become the mask token, 10 % another ordinary token, 10 % stay
END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
TOKENIZER_DOCUMENTS = 1_000_000  # the most that a tokenizer is trained on
DOCUMENTS_AT_ONCE = 256  # tokenized in parallel
LONG_FILE = 2**18  # characters; longer files of a folder are split into pieces
LINES_IN_A_PIECE = 256
IGNORED = -100  # label without a loss
TOKENS_VERSION = 3  # changes whenever the same text gives other tokens, so that caches are not mixed up

print_once = functools.cache(tqdm.write)  # the text is read three times


def documents(config: Config, title: str = "reading") -> Iterator[tuple[bytes, str]]:
    """Documents with their digests, always in the same order.

    Equal documents are yielded once, so that no document is both trained and validated on.
    """
    seen = set()
    texts = rows_of(config.dataset, config.dataset_column) if config.dataset else files_of(config.text or [])
    for text in tqdm(texts, desc=title, unit=" documents", leave=False):
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield digest, text


def files_of(paths: Sequence[str]) -> Iterator[str]:
    """The texts of files and folders.

    Named files, and long files of a folder, are split into pieces. Otherwise a single file could not be split into
    training and validation text.
    """
    for root in map(Path, paths):
        yield from files_below(root) if root.is_dir() else pieces_of(text_of(root))


def files_below(root: Path) -> Iterator[str]:
    """The text files of a folder. Hidden files are skipped, and so are files without text, with a message."""
    skipped: list[Exception] = []
    paths = visible_files(root, skipped.append)
    unreachable = len(skipped)
    for path in paths:
        try:
            text = text_of(path)
            yield from pieces_of(text) if len(text) > LONG_FILE else [text]
        except UserError as error:
            skipped.append(error)
    if skipped:
        total = unreachable + len(paths)
        print_once(f"{root}: skipped {len(skipped)} of {total} files; the first: {skipped[0]}")


def pieces_of(text: str) -> Iterator[str]:
    lines = iter(text.splitlines(keepends=True))
    while piece := "".join(itertools.islice(lines, LINES_IN_A_PIECE)):
        yield piece


def text_of(path: Path) -> str:
    try:
        if not path.is_file():
            raise UserError(f"text must name files and folders that exist, got {path}")
        text = read_uncompressed(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text must be complete and in UTF-8, got {path}: {type(error).__name__}: {error}") from error
    if "\0" in text:
        raise UserError(f"text must not hold NUL characters, got {path}")
    return text


def rows_of(name: str, column: str) -> Iterator[str]:
    """The texts of a dataset of Hugging Face."""
    import datasets  # needed for --dataset only

    rows = datasets.load_dataset(*name.split(":"), split="train")
    if column not in rows.column_names:
        raise UserError(f"dataset_column must be one of {rows.column_names}, got {column!r}")
    for number, row in enumerate(rows):
        try:
            row[column].encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise UserError(
                f"dataset_column must hold text, got row {number} of {column!r}: {row[column]!r:.60}"
            ) from error
        yield row[column]


def prepare_tokens(config: Config, cache: Path) -> Config:
    """Tokenize the text, if the cache does not hold its tokens. The returned configuration names their folder."""
    if config.tokens and (cache / config.tokens).exists():
        return config
    sizes = {digest: len(text) for digest, text in documents(config)}
    tokenizer = load_tokenizer(config.tokenizer).to_str() if config.tokenizer else f"bpe {config.vocab_size}"
    settings = f"{tokenizer} {config.validation_share} {TOKENS_VERSION}"
    key = hashlib.sha256(b"".join(sizes) + settings.encode()).hexdigest()[:16]
    if config.tokens not in ("", key):
        raise UserError("text and tokenizer must be those that the run began with, got others")
    folder = cache / key
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=cache) as temporary:
            partial = Path(temporary, key)
            partial.mkdir()
            write_tokens(config, held_out(sizes, config.validation_share), partial)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another run has written the same tokens in the meantime
                    raise
        sync(cache)
    entries = 1 + max(load_tokenizer(folder / "tokenizer.json").get_vocab().values())  # ids may have holes
    return dataclasses.replace(config, tokens=key, entries=entries)


def held_out(sizes: dict[bytes, int], share: float) -> set[bytes]:
    """Digests of the documents to validate on: those that fit into this share of the text, or else the smallest."""
    if len(sizes) < 2:
        raise UserError(f"text must have at least two documents, one of them to validate on, got {len(sizes)}")
    chosen, room = set(), share * sum(sizes.values())
    for digest in sorted(sizes)[:-1]:  # at least one is left to train on
        if sizes[digest] <= room:
            chosen.add(digest)
            room -= sizes[digest]
    return chosen or {min(sizes, key=lambda digest: (sizes[digest], digest))}


def write_tokens(config: Config, validation: set[bytes], folder: Path) -> None:
    """training.npy and validation.npy, each document followed by END_OF_TEXT, and tokenizer.json."""
    to_train = (text for digest, text in documents(config, "tokenizer") if digest not in validation)
    tokenizer = make_tokenizer(config, to_train)
    tokenizer.encode_special_tokens = True  # the names of special tokens in the text are ordinary text
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
    with open(folder / "training", "wb") as training, open(folder / "validation", "wb") as held_out:
        remaining = documents(config, "tokenizing")
        while some := list(itertools.islice(remaining, DOCUMENTS_AT_ONCE)):
            encodings = tokenizer.encode_batch([text for _, text in some], add_special_tokens=False)  # in parallel
            for (digest, _), encoding in zip(some, encodings, strict=True):
                tokens = np.array([*encoding.ids, end], dtype)
                tokens.tofile(held_out if digest in validation else training)
    for part in (folder / "training", folder / "validation"):
        np.save(part, np.memmap(part, dtype, mode="r"))
        part.unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    for path in (*folder.iterdir(), folder):
        sync(path)


def make_tokenizer(config: Config, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """The tokenizer of `config`, or a BPE trained on `texts`, with END_OF_TEXT and MASK."""
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT, MASK],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(itertools.islice(texts, TOKENIZER_DOCUMENTS), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT, MASK])  # has no effect on those that the tokenizer has
    vocabulary = tokenizer.get_vocab()
    if len(set(vocabulary.values())) < len(vocabulary):  # the package takes the number of entries as the next id
        raise UserError(f"tokenizer must have ids without holes, or {END_OF_TEXT} and {MASK}, got {config.tokenizer}")
    return tokenizer


def load_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise UserError(f"tokenizer must be a JSON file of the package tokenizers, got {path}: {error}") from error
    tokenizer.no_truncation()  # documents are tokenized completely, even if truncation was saved
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end, unless there is an error. Readers never see a part of it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    if os.name == "posix":  # Windows cannot open folders
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Batches:
    """Random windows of the text. They depend on seed and step only, so that resuming needs no replay.

    Any number of ranks draws the same windows, and each rank takes its share. Training masks depend on the number of
    ranks.
    """

    def __init__(self, config: Config, folder: Path, rank: int, world_size: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.lengths = config.validation_lengths or [config.seq_length]
        self.training = np.load(folder / "training.npy", mmap_mode="r")
        self.validation = np.load(folder / "validation.npy", mmap_mode="r")
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        self.mask_token, self.end_token = tokenizer.token_to_id(MASK), tokenizer.token_to_id(END_OF_TEXT)
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.ordinary = np.array(sorted(set(tokenizer.get_vocab().values()) - special))
        for tokens, length in ((self.training, config.seq_length), (self.validation, max(self.lengths))):
            if len(tokens) <= length:
                part = "train" if tokens is self.training else "validate"
                raise UserError(f"text must have more than {length} tokens to {part} on, got {len(tokens)}")

    def draw(self, step: int) -> Batch:
        """This rank's rows of the training batch at the full length."""
        length, seed = self.config.seq_length, self.config.seed
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(len(self.training) - length, size=self.config.batch_size)
        own = starts[self.rank :: self.world_size]
        windows = np.stack([self.training[start : start + length + 1] for start in own])
        return self.to_batch(windows, np.random.default_rng([seed, step, 1 + self.rank]))

    def to_validate(self, length: int) -> Batch:
        """This rank's rows of all validation windows. Lengths that divide the longest one see the same tokens."""
        longest = max(self.lengths)
        total = max(1, min(self.config.validation_tokens, len(self.validation) - 1) // longest) * longest
        batch = self.to_batch(self.validation[None, : total // length * length + 1], np.random.default_rng(0))
        missing = -(total // length) % self.world_size  # every rank runs the same number of forward passes
        rows = {}
        for name, filler in (("input_ids", 0), ("labels", IGNORED)):
            padded = F.pad(batch[name].view(-1, length), (0, 0, 0, missing), value=filler)
            rows[name] = padded[self.rank :: self.world_size]
        return rows

    def to_batch(self, windows: np.ndarray, generator: np.random.Generator) -> Batch:
        """Windows (B, S + 1) to inputs and labels (B, S)."""
        tokens = torch.from_numpy(windows.astype(np.int64))
        if self.config.objective == "causal":
            return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        tokens = tokens[:, :-1].contiguous()
        dice = torch.from_numpy(generator.random(tokens.shape, dtype=np.float32)) / MASKED_SHARE
        dice[tokens == self.end_token] = 1  # never masked
        chance = torch.from_numpy(self.ordinary[generator.integers(len(self.ordinary), size=tokens.shape)])
        replaced = torch.where(dice < 0.8, self.mask_token, torch.where(dice < 0.9, chance, tokens))
        return {"input_ids": replaced, "labels": torch.where(dice < 1, tokens, IGNORED)}
