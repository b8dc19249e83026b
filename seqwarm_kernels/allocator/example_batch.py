"""A batch of the size that training will see, and the call of a model with it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.resize_batch.schema import SEQUENCE_DIMS, Kind
from ..ops.resize_batch.validation import Layout, batch_layout
from ..utils.modules import signature, unwrapped

#: What a model is called with: keyword arguments by name, positional ones, or one tensor.
ExampleBatch = Mapping[str, Any] | Sequence[Tensor] | Tensor


def guess_batch(model: nn.Module, batch_size: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs of a Hugging Face model by its config, or token ids for a model whose first layer is an embedding.

    Causal, masked and encoder-decoder language models, and models of text and images of a fixed size.

    Raises:
        ValueError: the model is neither.
    """
    parameters = list(signature(model))
    first_layer = next((module for module in model.modules() if not list(module.children())), None)
    config = getattr(unwrapped(model), "config", None)
    vocabulary = _vocabulary_of(config) if "input_ids" in parameters else None
    if vocabulary is None and isinstance(first_layer, nn.Embedding):
        return {parameters[0]: torch.randint(first_layer.num_embeddings, (batch_size, length), device=device)}
    if vocabulary is None:
        raise ValueError(
            f"cannot guess the inputs of {type(model).__name__}: it has no config with a vocabulary, and its first "
            f"layer is {type(first_layer).__name__}, not Embedding; pass example_batch"
        )
    input_ids = torch.randint(vocabulary, (batch_size, length), device=device)
    batch = {"input_ids": input_ids}
    if "attention_mask" in parameters:
        batch["attention_mask"] = torch.ones_like(input_ids)
    has_labels = "labels" in parameters and unwrapped(model).get_output_embeddings() is not None  # type: ignore[operator]
    if has_labels:
        batch["labels"] = input_ids
    elif "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = input_ids
    image_size = _image_size_of(config)
    if "pixel_values" in parameters and image_size is not None:
        batch["pixel_values"] = torch.randn(batch_size, *image_size, device=device)
    return batch


def _vocabulary_of(config: Any) -> int | None:
    """Of its text, where a config has parts."""
    text = getattr(config, "text_config", None) or config
    return getattr(text, "vocab_size", None)


def _image_size_of(config: Any) -> tuple[int, int, int] | None:
    vision = getattr(config, "vision_config", None)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    return (channels, size, size) if isinstance(size, int) else None


def sequence_names(batch: Mapping[str, Any], length: int) -> list[str]:
    """The entries of a guessed batch that have a sequence dimension: not its images."""
    return [name for name, value in batch.items() if value.dim() == 2 and value.shape[1] == length]


def layout_of(batch: Mapping[str, Any], options: Mapping[str, Any]) -> Layout:
    """The rows and the length of a batch, and what takes part; `options` are those of resize_batch."""
    layout = batch_layout(
        batch,
        mode="truncate",
        seq_dim=options.get("seq_dim", 1),
        keys=options.get("keys"),
        mask_keys=options.get("mask_keys"),
    )
    if layout.batch_size == 0:
        raise ValueError("example_batch must have at least one row, got 0")
    return layout


def stretched(batch: Mapping[str, Any], rows: int, length: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The batch's own rows and tokens, repeated to (rows, length); masks become all ones."""
    layout, row_dim = layout_of(batch, options), 1 - options.get("seq_dim", 1)
    result = dict(batch)
    for name, kind in layout.kinds.items():
        tensor = _repeated(batch[name], 0 if kind in (Kind.ROW, Kind.SQUARE) else row_dim, rows)
        leading = tensor.dim() - 3 if kind == Kind.SQUARE else 0  # (B, 1, S, S)
        for dim in SEQUENCE_DIMS[kind]:
            tensor = _repeated(tensor, dim + leading if kind == Kind.SQUARE else 1 - row_dim, length)
        is_mask = name.endswith("_mask") and not tensor.is_floating_point()
        result[name] = torch.ones_like(tensor) if is_mask else tensor
    for name, value in batch.items():  # images and the like keep up with the rows
        if name not in layout.kinds and isinstance(value, Tensor) and value.shape[:1] == (layout.batch_size,):
            result[name] = _repeated(value, 0, rows)
    return result


def _repeated(tensor: Tensor, dim: int, size: int) -> Tensor:
    """What a dimension holds, over and over, up to `size`."""
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


def as_mapping(batch: ExampleBatch) -> dict[str, Any]:
    """Positional arguments under their numbers, so that one code path resizes all."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        return {"0": batch}
    if isinstance(batch, (list, tuple)) and all(isinstance(entry, Tensor) for entry in batch):
        return {str(index): tensor for index, tensor in enumerate(batch)}
    raise TypeError(
        f"example_batch must be a mapping, a tensor, or a tuple or list of tensors, got {type(batch).__name__}"
    )


def as_given(mapping: dict[str, Any], batch: ExampleBatch) -> ExampleBatch:
    """The reverse of `as_mapping`."""
    if isinstance(batch, Mapping):
        return mapping
    return mapping["0"] if isinstance(batch, Tensor) else tuple(mapping.values())


def call_model(model: nn.Module, batch: ExampleBatch) -> Any:
    """A mapping goes by the names that `forward` has, or whole where it has none of them and one parameter.

    Of a tuple goes as much as `forward` takes: the rest (labels) is for the loss function.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    parameters = signature(model)
    kinds = [parameter.kind for parameter in parameters.values()]
    if not isinstance(batch, Mapping):
        takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
        return model(*(batch if takes_all else batch[: len(parameters)]))
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return model(**batch)
    named = {name: value for name, value in batch.items() if name in parameters}
    if not named and len(parameters) == 1:
        return model(batch)
    return model(**named)
