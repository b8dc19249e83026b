"""Batches of the size that training will use, made from an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..resizing.containers import flatten_batch, unflatten_batch
from ..resizing.functional import resize_batch
from ..resizing.model_resizing import ModelResizing
from ..utils.modules import ExampleBatch, as_mapping, from_mapping, guess_batch, text_of

#: Options of `resize_batch` that say which dimensions of which tensors hold tokens.
_LAYOUT_OPTIONS = ("seq_dim", "keys", "mask_keys")


class TrainingBatches:
    """Makes batches as in training: of (rows, max_len) on the device, then resized.

    Args:
        model: Its inputs are guessed if there is no example.
        example: Any batch of the model, or None.
        max_len: Length of a batch before it is resized.
        device: Device of the batches.
        resize_options: Keyword arguments of `resize_batch`.
        shard: Takes a resized batch, returns this rank's part; None: all of it.

    Raises:
        ValueError: The inputs of the model cannot be guessed, or the example has no row of two tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        example: ExampleBatch | None,
        max_len: int,
        device: torch.device,
        resize_options: Mapping[str, Any] | None,
        shard: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model, self.example, self.max_len, self.device, self.shard = model, example, max_len, device, shard
        self.resizing = ModelResizing(model, {**(resize_options or {}), "return_info": False})
        self.resize_options = self.resizing.options
        if example is None:
            guessed = guess_batch(model, 1, max_len, device)
            names = [name for name, value in guessed.items() if value.shape == (1, max_len)]
            self.resize_options.setdefault("keys", names)  # images are not resized
            self.layout = None
        else:
            named = as_mapping(example)
            text = text_of(model, named)
            if text is not named:
                self.resize_options.setdefault("keys", [*text])  # images are not resized
            options = {name: value for name, value in self.resize_options.items() if name in _LAYOUT_OPTIONS}
            self.layout = Layout(named, options, with_images=text is not named)

    def example_rows(self) -> int:
        return 1 if self.layout is None else self.layout.rows

    def make(self, rows: int, length: int) -> ExampleBatch:
        """Return a batch of (rows, max_len) after `resize_batch` to `length`, or this rank's part."""
        if self.layout is None:
            batch: Any = guess_batch(self.model, rows, self.max_len, self.device)
        else:
            batch = self.layout.repeated_to(rows, self.max_len, self.device)
        resized = self.resizing.strip(resize_batch(batch, length, **self.resize_options), batch)
        parts = resized if self.shard is None else self.shard(resized)
        return parts if self.example is None else from_mapping(parts, self.example)


class Layout:
    """An example, and which of its dimensions hold tokens: those that `resize_batch` cuts.

    Args:
        example: The batch by name.
        options: Options of `resize_batch`.
        with_images: Whether tokens stand for images, of which there must not be more than before.

    Attributes:
        rows: Its number of rows.
        is_packed: Whether its row holds several sequences. `resize_batch` keeps a token of each.
    """

    def __init__(self, example: dict[str, Any], options: Mapping[str, Any], *, with_images: bool = False) -> None:
        self.example, self.entries, self.with_images = example, flatten_batch(example), with_images
        self.token_dims: dict[Any, list[int]] = {}
        self.rows, self.is_packed = 0, False
        for name, cut in flatten_batch(resize_batch(example, 1, **options)).items():
            if isinstance(cut, Tensor):
                shape = self.entries[name].shape
                dims = self.token_dims[name] = [dim for dim, kept in enumerate(cut.shape) if kept < shape[dim]]
                self.is_packed = self.is_packed or any(cut.shape[dim] > 1 for dim in dims)
                if len(dims) == 1:  # masks over pairs of tokens may be one for all rows
                    self.rows = max(self.rows, shape[_row_dim(dims)] if cut.dim() > 1 else 1)
        if self.rows == 0:
            raise ValueError("example_batch must have a row of at least two tokens")

    def repeated_to(self, rows: int, length: int, device: torch.device) -> Any:
        """Return the example with its rows and tokens repeated to (rows, length), on the device."""
        if self.is_packed and rows != 1:
            raise ValueError(f"batch_size must be 1, the one row of a packed example_batch, got {rows}")
        entries = {
            name: self._repeated(name, value, rows, length).to(device) if isinstance(value, Tensor) else value
            for name, value in self.entries.items()
        }
        return unflatten_batch(self.example, entries)

    def _repeated(self, name: Any, tensor: Tensor, rows: int, length: int) -> Tensor:
        dims = self.token_dims[name]
        row_dim = _row_dim(dims)
        if tensor.dim() > row_dim and tensor.shape[row_dim] == self.rows:
            tensor = _repeat(tensor, row_dim, rows)  # also without tokens, as an image for each row
        for dim in dims:
            tensor = _repeat(tensor, dim, length, only_last=self.with_images)
        if dims and str(name).endswith("_mask") and not tensor.is_floating_point():
            return torch.ones_like(tensor)
        if dims and str(name).endswith("position_ids") and not self.is_packed:
            counted = torch.ones_like(tensor).cumsum(dims[0]) - 1
            return counted.to(tensor.dtype)
        return tensor


def _row_dim(token_dims: list[int]) -> int:
    """Return the dimension of rows: the one before tokens, or behind them with seq_dim=0."""
    return 1 if token_dims in ([0], [2]) else 0


def _repeat(tensor: Tensor, dim: int, size: int, *, only_last: bool = False) -> Tensor:
    """Repeat the contents of a dimension, or only its last entry, up to `size`."""
    index, length = torch.arange(size, device=tensor.device), tensor.shape[dim]
    return tensor.index_select(dim, index.clamp(max=length - 1) if only_last else index % length)
