"""Resizes the inputs of a model in training before its forward, and counts them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ops.resize_batch.schema import IGNORED_LABEL
from ..resizing.containers import is_container
from ..resizing.functional import check_resize_options
from ..resizing.model_resizing import ModelResizing
from ..utils.modules import NUM_ITEMS_IN_BATCH, forward_parameters, has_context_parallel, unwrapped

#: Attribute in which a model keeps its attachment.
_ATTRIBUTE = "_seqwarm_attachment"

#: Arguments with which the Trainers of Hugging Face and TRL divide a loss by the labels before cutting.
_COUNTS_BEFORE_CUTTING = frozenset({NUM_ITEMS_IN_BATCH, "fused_lm_head"})

#: Modules of torch whose tensors are (sequence, batch, ...) without `batch_first=True`.
_TOKENS_FIRST = (
    *(nn.MultiheadAttention, nn.Transformer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerEncoderLayer),
)


class Resizer(Protocol):
    """A scheduler, or another object that resizes batches to its current length."""

    @property
    def seq_length(self) -> int: ...

    def resize(self, batch: Any, **resize_options: Any) -> Any: ...


class Seen(NamedTuple):
    """Amount of data that went through a model."""

    tokens: int  #: after resizing: the tokens of the attention mask, or all tokens without a mask
    samples: int  #: rows after resizing; of packed batches, sequences


class Attachment:
    """Resizes the arguments of a model's calls in training. Made by `SequenceLengthScheduler.attach`.

    Attributes:
        seq_length: Length of the last resized batch; None before the first. Sequences of a packed batch may all be
            shorter.
    """

    def __init__(
        self, model: nn.Module, scheduler: Resizer, resize_options: Mapping[str, Any], receiver: nn.Module | None = None
    ) -> None:
        """`receiver`: the model that gets the batch, if it is not `model`."""
        if "return_info" in resize_options:
            raise TypeError("resize_options must not hold return_info, which the attachment passes itself")
        check_resize_options(resize_options)
        if attachment_of(model) is not None:
            raise ValueError("model has a scheduler attached already; call remove() of that attachment first")
        if has_context_parallel(model):
            raise ValueError("model must have no ContextParallel to be attached; call shard(scheduler.resize(batch))")
        _check_layout(model, resize_options)
        self.seq_length: int | None = None
        self._model = model
        self._scheduler = scheduler
        self._resizing = ModelResizing(receiver or model, resize_options)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [name for name, parameter in forward_parameters(model).items() if parameter.kind in kinds]
        self._tokens: Tensor | None = None  # since the last call of `take_seen`
        self._samples = 0
        self._is_paused = False
        self._handle: RemovableHandle | None = None
        self._compiled_call: Any = model._compiled_call_impl
        if self._compiled_call is None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)
        else:  # of `model.compile()`, whose graph would include a hook
            model._compiled_call_impl = self._resize_and_call
        self._requirement = self._resizing.require()  # after the hook, which resizes first
        model.__dict__[_ATTRIBUTE] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _InertHook, ()  # a copy of the model would train on a schedule that nobody steps

    def remove(self) -> None:
        """Restore the model. A second call does nothing."""
        if self._model.__dict__.get(_ATTRIBUTE) is not self:
            return
        del self._model.__dict__[_ATTRIBUTE]
        self._requirement.remove()
        if self._handle is not None:
            self._handle.remove()
        elif self._model._compiled_call_impl == self._resize_and_call:  # else it was compiled again
            self._model._compiled_call_impl = self._compiled_call

    def take_seen(self) -> Seen:
        """Data since the last call of `take_seen`. Waits for the device, so call it once in an optimizer step."""
        seen = Seen(0 if self._tokens is None else int(self._tokens), self._samples)
        self._tokens, self._samples = None, 0
        return seen

    def _resize_and_call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self(self._model, args, kwargs)
        return self._compiled_call(*args, **kwargs)

    @torch._disable_dynamo  # keeps the hook out of a graph that is made later; the public name imports all of dynamo
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook: returns the resized arguments."""
        self._requirement.is_resizing = False
        if self._is_paused or not model.training:
            return args, kwargs
        if not torch.is_grad_enabled():
            return args, kwargs
        self._requirement.is_resizing = True
        # In backward, activation checkpointing repeats a forward. torch has no public way to ask.
        node = torch._C._current_autograd_node()
        is_repeated = node is not None
        if is_repeated and node.name() == "CheckpointFunctionBackward":
            raise RuntimeError("use_reentrant must be False in a checkpoint around an attached model, got True")
        if len(args) == 1 and is_container(args[0]) and not any(isinstance(value, Tensor) for value in kwargs.values()):
            _refuse_counts(kwargs)
            return (self._resized(args[0], is_repeated),), kwargs  # the batch is one argument
        names = self._names[: len(args)]
        if len(names) < len(args) or not kwargs.keys().isdisjoint(names):  # of a forward (*args)
            names = [str(index) for index in range(len(args))]
            _check_numbered(dict(zip(names, args, strict=True)), self._resizing.options)
        inputs = dict(zip(names, args, strict=True)) | kwargs
        _refuse_counts(inputs)
        resized = self._resized(inputs, is_repeated)
        self._resizing.check_taken(resized, inputs)
        return tuple(resized.pop(name, None) for name in names), resized  # "segments" removes the attention mask

    def _resized(self, batch: Any, is_repeated: bool) -> Any:
        resized, info = self._scheduler.resize(batch, **self._resizing.options, return_info=True)
        resized = self._resizing.strip(resized, batch)
        positions = info.position_ids
        longest = max(each.shape[1] for each in (positions if isinstance(positions, tuple) else (positions,)))
        self.seq_length = min(self._scheduler.seq_length, longest)
        if not is_repeated:
            tokens = info.num_valid_tokens  # of which `out=` writes a new value into the same memory
            self._tokens = tokens.clone() if self._tokens is None else self._tokens + tokens
            self._samples += len(info.valid_lengths)
        return resized


class _InertHook:
    """What a copied or pickled model has in place of its attachment. Does nothing."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        return None


def _refuse_counts(inputs: Mapping[str, Any]) -> None:
    for name in _COUNTS_BEFORE_CUTTING & inputs.keys():
        if inputs[name] is not None and inputs[name] is not False:
            raise ValueError(
                f"{name} must not be passed to an attached model; remove the attachment, and use "
                "SequenceLengthWarmup(...).add_to(trainer)"
            )


def _check_layout(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Check that a module of torch takes (batch, sequence) tensors, which are resized without `seq_dim`."""
    inner = unwrapped(model)
    if type(inner) not in _TOKENS_FIRST or options.get("seq_dim", 1) != 1:
        return
    if any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in inner.modules()):
        raise ValueError(f"seq_dim must be 0 for a {type(inner).__name__} without batch_first, got 1")


def _check_numbered(entries: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check the options for positional arguments without names, of which any may be labels."""
    remainder, keys, values = options.get("remainder"), options.get("keys"), options.get("pad_values") or {}
    if remainder not in ("pad", "overlap"):
        return
    resized = [name for name, value in entries.items() if _may_be_labels(value) and (not keys or name in keys)]
    if remainder == "overlap" and len(resized) > 1:
        raise ValueError("remainder must be 'drop' or 'pad' for unnamed tensors, of which some may be labels")
    missing = [name for name in resized if name not in values]
    if remainder == "pad" and missing:
        raise ValueError(
            f"pad_values must have a value for the unnamed tensor {missing[0]!r}, {IGNORED_LABEL} for labels"
        )


def _may_be_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point() and value.dtype.is_signed


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of `model` itself."""
    present = model.__dict__.get(_ATTRIBUTE)
    return present if isinstance(present, Attachment) else None


@contextmanager
def paused_attachments(model: nn.Module) -> Iterator[None]:
    """Let the attachments of a model and its submodules resize and count nothing in the block."""
    attachments = [attachment for module in model.modules() if (attachment := attachment_of(module)) is not None]
    try:
        for attachment in attachments:
            attachment._is_paused = True
        yield
    finally:
        for attachment in attachments:
            attachment._is_paused = False
