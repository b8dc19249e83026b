"""The user's model: the module inside torch's wrappers, the inputs of its forward, and a call with a batch."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_dense

#: Argument in which Hugging Face's Trainer passes the number of labels in all batches of a step. A model that gets it
#: divides its sum of losses by it.
NUM_ITEMS_IN_BATCH = "num_items_in_batch"

#: Entry of a rank's part of a batch: "tokens" if the rank has some tokens of all rows, "rows" if it has whole rows. A
#: model with `parallel.ContextParallel` takes it from its arguments.
CONTEXT_PART = "context_part"

#: What the forward of a model of transformers calls its cache, since 5.24 and before.
CACHE_NAMES = ("cache", "past_key_values")

#: A batch that a model is called with: keyword arguments by name, positional arguments, or one tensor.
ExampleBatch = Mapping[str, Any] | Sequence[Tensor] | Tensor

#: Entries of the configs of transformers.
_PLACEHOLDER = re.compile("(image|video|audio)_token_(id|index)")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside a module of torch.compile or DistributedDataParallel."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            return unwrapped(inner)
    return model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the forward of the user's module, by name."""
    return inspect.signature(unwrapped(model).forward).parameters


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile compiled the model or a module in it."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, which is not imported for this."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def has_context_parallel(model: nn.Module) -> bool:
    """Whether layers of the model have `parallel.ContextParallel`, whose module is not imported for this."""
    return any(hasattr(getattr(module, "context", None), "shards_tokens") for module in model.modules())


def shifts_labels(model: nn.Module) -> bool:
    """Whether a Hugging Face model's loss leaves out the first label of each row, as in causal language models.

    A model without `loss_type`, such as GPT-2, has the loss of causal language models.
    """
    inner = unwrapped(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    loss_type = getattr(inner, "loss_type", None)
    losses = sys.modules.get("transformers.loss.loss_utils")  # is imported by all models that have a type of loss
    return loss_type is None or (
        losses is not None and losses.LOSS_MAPPING.get(str(loss_type)) is losses.ForCausalLMLoss
    )


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode without gradients. Train/eval flags and random streams are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            torch.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def guess_batch(model: nn.Module, batch_size: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Random inputs for a Hugging Face model with a vocabulary, or for a model whose first layer is an embedding.

    Covers causal, masked and encoder-decoder language models, and models of text and images of a fixed size. Models in
    which tokens stand for images, as in LLaVA, get text alone.

    Raises:
        ValueError: The model has no config with a vocabulary, and its first layer is not an embedding.
    """
    parameters = list(forward_parameters(model))
    first_layer = next((module for module in model.modules() if not list(module.children())), None)
    config = getattr(unwrapped(model), "config", None)
    text = getattr(config, "text_config", None) or config  # a text model may have a config of its own
    vocabulary = getattr(text, "vocab_size", None) if "input_ids" in parameters else None
    if vocabulary is None and isinstance(first_layer, nn.Embedding):
        return {parameters[0]: torch.randint(first_layer.num_embeddings, (batch_size, length), device=device)}
    if vocabulary is None:
        raise ValueError(
            f"cannot guess the inputs of {type(model).__name__}: it has no config with a vocabulary, and its first "
            f"layer is {type(first_layer).__name__}, not Embedding; pass example_batch"
        )
    input_ids = torch.randint(vocabulary, (batch_size, length), device=device)
    placeholders = _placeholders(config)
    if placeholders:
        word = next(token for token in range(vocabulary) if token not in placeholders)
        input_ids[_is_placeholder(input_ids, placeholders)] = word
    batch = {"input_ids": input_ids}
    if "attention_mask" in parameters:
        batch["attention_mask"] = torch.ones_like(input_ids)
    has_labels = "labels" in parameters and unwrapped(model).get_output_embeddings() is not None  # type: ignore[operator]
    if has_labels:
        batch["labels"] = input_ids
    elif "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = input_ids
    vision = getattr(config, "vision_config", None)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if "pixel_values" in parameters and isinstance(size, int) and not placeholders:
        batch["pixel_values"] = torch.randn(batch_size, channels, size, size, device=device)
    return batch


def _placeholders(config: Any) -> list[int]:
    """The tokens that stand for images, videos or audio. The model puts their features in place of them."""
    entries = vars(config) if config is not None else {}
    return [token for name, token in entries.items() if _PLACEHOLDER.match(name) and isinstance(token, int)]


def _is_placeholder(input_ids: Tensor, placeholders: list[int]) -> Tensor:
    return torch.isin(input_ids, torch.tensor(placeholders, device=input_ids.device))


def text_of(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch without images, videos and audio: the entries of each token, with text for placeholders.

    It is the batch itself if no token is a placeholder.
    """
    input_ids, placeholders = batch.get("input_ids"), _placeholders(getattr(unwrapped(model), "config", None))
    if not isinstance(input_ids, Tensor) or not placeholders:
        return batch
    hidden = _is_placeholder(input_ids, placeholders)
    if not hidden.any() or hidden.all():
        return batch
    of_tokens = {name: value for name, value in batch.items() if getattr(value, "shape", None) == input_ids.shape}
    return of_tokens | {"input_ids": input_ids.masked_fill(hidden, int(input_ids[~hidden][0]))}


def as_mapping(batch: ExampleBatch) -> dict[str, Any]:
    """The batch by name. The names of positional arguments are their numbers."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        check_dense("example_batch", batch)
        return {"0": batch}
    if isinstance(batch, (list, tuple)) and all(isinstance(entry, Tensor) for entry in batch):
        return {str(index): tensor for index, tensor in enumerate(batch)}
    raise TypeError(
        f"example_batch must be a mapping, a tensor, or a tuple or list of tensors, got {type(batch).__name__}"
    )


def from_mapping(mapping: dict[str, Any], batch: ExampleBatch) -> ExampleBatch:
    """The reverse of `as_mapping`: the entries of `mapping` in the form of `batch`."""
    if isinstance(batch, Mapping):
        return mapping
    return mapping["0"] if isinstance(batch, Tensor) else tuple(mapping.values())


def with_same_token(batch: ExampleBatch) -> ExampleBatch:
    """The batch with its first token everywhere. Position ids are kept, so that their effect shows."""
    same: dict[str, Any] = {}  # also by id of the tensor: entries that are one object stay one object
    for name, value in as_mapping(batch).items():
        is_sequence = isinstance(value, Tensor) and value.dim() > 1 and value.numel() > 0
        if is_sequence and "position" not in name:
            value = same.setdefault(str(id(value)), value[:1, :1].expand_as(value).contiguous())
        same[name] = value
    return from_mapping({name: same[name] for name in as_mapping(batch)}, batch)


def call_model(model: nn.Module, batch: ExampleBatch) -> Any:
    """Call the model with the part of a batch that its forward takes.

    The entries of a mapping are passed by name. If the only parameter of the forward is not an entry, the mapping
    itself is passed. The rest of a tuple, such as labels, is for the loss function.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    parameters = forward_parameters(model)
    kinds = [parameter.kind for parameter in parameters.values()]
    if not isinstance(batch, Mapping):
        takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
        return model(*(batch if takes_all else batch[: len(parameters)]))
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    named = {name: value for name, value in batch.items() if takes_all or name in parameters}
    if not named and not takes_all and len(parameters) == 1:
        return model(batch)
    if CONTEXT_PART in batch and has_context_parallel(model):  # a hook takes it before the forward
        named[CONTEXT_PART] = batch[CONTEXT_PART]
    return model(**named)
