"""Resizes the inputs of a model in training mode before its forward."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ops.resize_batch.schema import IGNORED_LABEL
from ..resizing.containers import cut_entries, flatten_batch, is_container, unflatten_batch
from ..resizing.functional import check_resize_options
from ..utils.caller_warnings import warn_caller
from ..utils.checks import check_module
from ..utils.modules import forward_parameters, unwrapped
from .label_counts import (
    NUM_ITEMS_IN_BATCH,
    check_labels,
    count_loss_labels,
    kept_share,
    prefixes_of_counts,
    scaled_count,
    shifts_labels,
)
from .lost_labels import NO_LABEL, lost_labels_on_device
from .outside_labels import OutputCheck, has_labels, warn_of_outside_labels

#: Argument with which TRL's trainers ask for losses of tokens, which they sum and divide themselves.
FUSED_LM_HEAD = "fused_lm_head"

#: Attribute in which a model keeps its attachment.
_ATTRIBUTE = "_seqwarm_attachment"

_PICKLED = (
    "the model was pickled while a SequenceLengthScheduler was attached, and pickling does not keep an attachment: its "
    "inputs are not resized. Call scheduler.attach(model) to resize them"
)

#: Modules of torch whose tensors are (sequence, batch, ...) without `batch_first=True`.
_TOKENS_FIRST = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
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
    """Resizes the arguments of a model's calls in training mode. Made by `SequenceLengthScheduler.attach`.

    Attributes:
        seq_length: Length of the last batch in training mode, after resizing; None before the first batch. Sequences
            of a packed batch may all be shorter.
    """

    _is_copy = False
    _is_paused = False
    _compiled: Any = None  # what a call of a model calls that was compiled in place
    _handle: RemovableHandle | None = None  # of the hook of any other model

    def __init__(self, model: nn.Module, scheduler: Resizer, resize_options: Mapping[str, Any]) -> None:
        check_module("model", model)
        if "return_info" in resize_options:
            raise TypeError("resize_options must not hold return_info: the attachment uses it to count tokens")
        check_resize_options(resize_options)
        present = attachment_of(model)
        if present is not None and not present._is_copy:
            raise ValueError("model has a scheduler attached already; call remove() of that attachment first")
        _check_layout(model, resize_options)
        self._initialize(model, scheduler, dict(resize_options), _positional_names(model))
        if present is not None:
            present.remove()
        _remove_pickled(model)
        self._compiled = model._compiled_call_impl
        if self._compiled is None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)
        else:  # before the graph of `model.compile()`, which would include a hook
            model._compiled_call_impl = self._resize_and_call
        model.__dict__[_ATTRIBUTE] = self

    def _initialize(
        self, model: nn.Module, scheduler: Resizer, resize_options: dict[str, Any], names: list[str]
    ) -> None:
        self.seq_length: int | None = None
        self._model = model
        self._scheduler = scheduler
        self._options = resize_options
        self._names = names
        self._tokens: Tensor | None = None
        self._samples = 0
        self._counted: list[weakref.ref[Tensor]] | None = None  # main inputs since `begin_batch`
        self._shares: list[Tensor] = []
        self._lost_labels: Tensor | None = None
        self._has_warned_of_labels = False
        self._may_lack_labels = True  # until the first batch that is cut
        self._looks_at_output = False  # of the current call
        self._copies: weakref.WeakSet[Attachment] = weakref.WeakSet()  # also of copies, which share this set

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Attach the copy of the model to the same scheduler. The copy counts its own batches."""
        copied = Attachment.__new__(Attachment)
        memo[id(self)] = copied
        model = copy.deepcopy(self._model, memo)  # it may not have its attributes yet
        copied._initialize(model, self._scheduler, copy.deepcopy(self._options, memo), self._names)
        copied._handle = copied._copy_of_hook(self, memo)
        copied._is_copy, copied._copies = True, self._copies
        self._copies.add(copied)
        return copied

    def _copy_of_hook(self, source: Attachment, memo: dict[int, Any]) -> RemovableHandle:
        """The handle of this attachment's hook, in the copied hooks of the model of `source`."""
        if source._handle is not None:
            return copy.deepcopy(source._handle, memo)
        # The model of `source` was compiled in place. Its copy is not compiled, so the copy needs a hook.
        hooks: dict[int, Any] = copy.deepcopy(source._model._forward_pre_hooks, memo)
        with_kwargs = copy.deepcopy(source._model._forward_pre_hooks_with_kwargs, memo)
        handle = RemovableHandle(hooks, extra_dict=with_kwargs)
        hooks[handle.id], with_kwargs[handle.id] = self, True
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _PickledAttachment, ()

    def remove(self) -> None:
        """Restore the model and its deep copies. A second call does nothing."""
        for copied in [] if self._is_copy else list(self._copies):
            copied.remove()
        if not self.is_attached:
            return
        del self._model.__dict__[_ATTRIBUTE]
        if self._handle is not None:
            self._handle.remove()
        else:
            self._model._compiled_call_impl = self._compiled

    @property
    def is_attached(self) -> bool:
        """Whether the model has this attachment: it was not removed, and there is no newer one."""
        return self._model.__dict__.get(_ATTRIBUTE) is self

    @property
    def has_unseen(self) -> bool:
        """Whether batches went through the model since the last call of `take_seen`."""
        return self._tokens is not None

    def take_seen(self) -> Seen:
        """Data since the last call of `take_seen`. Waits for the device, so call it once in an optimizer step.

        Warns once if a batch on a device lost all its labels. The scheduler's `resize` warns of those in host memory.
        """
        seen = Seen(0 if self._tokens is None else int(self._tokens), self._samples)
        lost, self._lost_labels = self._lost_labels, None
        self._tokens, self._samples = None, 0
        if lost:
            self._has_warned_of_labels = True
            warn_caller(NO_LABEL.format(self.seq_length))
        return seen

    def begin_batch(self) -> None:
        """Let calls with the same main input count once, until the next call of this method."""
        self._counted = []

    def take_shares(self) -> list[Tensor]:
        """The share of its labels that each batch with `num_items_in_batch` kept, since the last call."""
        shares, self._shares = self._shares, []
        return shares

    def _resize_and_call(self, *args: Any, **kwargs: Any) -> Any:
        self._looks_at_output = False  # the call before may have raised
        args, kwargs = self(self._model, args, kwargs)
        output = self._compiled(*args, **kwargs)
        if self._looks_at_output:
            warn_of_outside_labels(output, self.seq_length)
        return output

    @torch._disable_dynamo  # keeps the hook out of a graph that is made later; the public name imports all of dynamo
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook: returns the resized arguments."""
        if self._is_paused or not model.training:
            return args, kwargs
        if len(args) == 1 and is_container(args[0]):  # the batch is one argument
            return self._resized_container(args[0], kwargs)
        names = [name for name, _ in zip(self._names, args, strict=False)]
        named = len(names) == len(args) and not set(names) & kwargs.keys()
        if not named:
            names = [str(index) for index in range(len(args))]
            _check_numbered(dict(zip(names, args, strict=True)), self._options)
        inputs = dict(zip(names, args, strict=True)) | kwargs
        has_num_items = NUM_ITEMS_IN_BATCH in inputs
        num_items = inputs.pop(NUM_ITEMS_IN_BATCH, None)  # of any shape
        if num_items is not None:
            check_labels(inputs, "")
        if inputs.get(FUSED_LM_HEAD):
            raise ValueError(
                f"{FUSED_LM_HEAD} must not be passed to the model: TRL divides its loss by the number of labels before "
                "they are cut; call add_to(trainer) of SequenceLengthWarmup instead of passing it in callbacks"
            )
        resized = self._resized(inputs)
        if num_items is not None:
            num_items = self._scaled(num_items, inputs, resized, "")
        if has_num_items:
            resized[NUM_ITEMS_IN_BATCH] = num_items
        return tuple(resized.pop(name) for name in names), resized

    def _resized_container(self, batch: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
        """A batch that is the one positional argument. The count of its labels may be a keyword argument."""
        num_items = kwargs.get(NUM_ITEMS_IN_BATCH)
        if num_items is None:
            return (self._resized(batch),), kwargs
        entries = flatten_batch(batch)
        check_labels(entries, "")
        resized = self._resized(batch)
        return (resized,), {**kwargs, NUM_ITEMS_IN_BATCH: self._scaled(num_items, entries, flatten_batch(resized), "")}

    def _resized(self, batch: Any) -> Any:
        prefixes = prefixes_of_counts(batch)
        seq_length = self._scheduler.seq_length
        result, info = self._scheduler.resize(batch, **self._options, return_info=True)
        tokens = info.num_valid_tokens
        lost = None if self._has_warned_of_labels else lost_labels_on_device(batch, result)
        if lost is not None:
            self._lost_labels = lost if self._lost_labels is None else self._lost_labels | lost
        if not self._is_counted(batch):
            # A copy, since buffers are written again.
            self._tokens = tokens.clone() if self._tokens is None else self._tokens + tokens
            self._samples += len(info.valid_lengths)  # a packed batch has one row of several sequences
        rows, length = info.position_ids.shape
        self.seq_length = min(seq_length, length)
        if self._may_lack_labels and torch.is_grad_enabled() and any(cut_entries(batch, result)):
            self._may_lack_labels = False
            if not has_labels(batch):
                self._look_at_output()
        return self._with_scaled_counts(batch, result, prefixes, (rows, length)) if prefixes else result

    def _is_counted(self, batch: Any) -> bool:
        """Whether the main input of a batch was counted since `begin_batch`. Notes it if not."""
        if torch._C._current_graph_task_id() != -1:  # in backward: activation checkpointing repeats a forward
            return True
        if self._counted is None:
            return False
        name = getattr(unwrapped(self._model), "main_input_name", "input_ids")  # of Hugging Face's models
        tokens = flatten_batch(batch).get(name)
        if not isinstance(tokens, Tensor):
            return False
        if any(counted() is tokens for counted in self._counted):
            return True
        self._counted.append(weakref.ref(tokens))
        return False

    def _with_scaled_counts(self, batch: Any, resized: Any, prefixes: list[str], sizes: tuple[int, int]) -> Any:
        entries, kept, scaled = flatten_batch(batch), flatten_batch(resized), {}
        for prefix in prefixes:
            name = prefix + NUM_ITEMS_IN_BATCH
            scaled[name] = self._scaled(entries[name], entries, kept, prefix)
        return unflatten_batch(resized, scaled, sizes)

    def _scaled(self, num_items: Any, entries: Mapping[str, Any], kept: Mapping[str, Any], prefix: str) -> Tensor:
        """The number of labels in all batches of a step, if each keeps the share of its labels that this one keeps."""
        shifts = shifts_labels(self._model)
        share = kept_share(*(count_loss_labels(batch, shifts, prefix) for batch in (entries, kept)))
        self._shares.append(share)
        return scaled_count(num_items, share)

    def _look_at_output(self) -> None:
        """Warn after this call if a loss seems to be computed outside of the model."""
        if self._handle is None:
            self._looks_at_output = True
        elif self._model._compiled_call_impl is None:  # else the hook would become part of a graph
            OutputCheck.of_next_output(self._model, self.seq_length)


def _check_layout(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Check that a module of torch takes (batch, sequence) tensors, which are resized without `seq_dim`."""
    inner = unwrapped(model)
    if type(inner) not in _TOKENS_FIRST or options.get("seq_dim", 1) != 1:
        return
    if any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in inner.modules()):
        raise ValueError(
            f"batch_first must be True in {type(inner).__name__}, or seq_dim=0 be passed to attach: its tensors are "
            "(sequence, batch, ...) by torch's default, and rows would be cut instead of tokens"
        )


def _positional_names(model: nn.Module) -> list[str]:
    """Names of the forward's parameters that take one positional argument each."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in forward_parameters(model).items() if parameter.kind in kinds]


def _check_numbered(entries: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Numbers do not tell labels, which must neither be padded with 0 nor count twice."""
    remainder, keys, values = options.get("remainder"), options.get("keys"), options.get("pad_values") or {}
    if remainder not in ("pad", "overlap"):
        return
    resized = [name for name, value in entries.items() if _is_integer_sequence(value) and (not keys or name in keys)]
    if remainder == "overlap" and len(resized) > 1:
        raise ValueError(
            "remainder must be 'drop' or 'pad' with arguments or tuples whose entries have no names, got 'overlap': "
            "the labels of tokens that stand twice would count twice; pass a mapping or a named tuple with 'labels'"
        )
    missing = [name for name in resized if name not in values]
    if remainder == "pad" and missing:
        raise ValueError(
            f"pad_values must have a value for {missing[0]!r} ({entries[missing[0]].dtype}), which may hold labels: "
            f"{IGNORED_LABEL}, which cross_entropy leaves out, if it does, and 0 or the padding token if it holds "
            "tokens; or pass a mapping or a named tuple with 'labels'"
        )


def _is_integer_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point() and value.dtype.is_signed


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of `model` itself. A model that was pickled with one has none."""
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


class _PickledAttachment:
    """Stands for an attachment in a model that was pickled. It does not resize, and warns of this once."""

    _has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _PickledAttachment, ()  # without `_has_warned`: another process warns again

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and not self._has_warned and not torch.compiler.is_compiling():
            self._has_warned = True
            warn_caller(_PICKLED)

    def remove(self) -> None:
        """Do nothing, as `Attachment.remove` of a model without the attachment."""


def _remove_pickled(model: nn.Module) -> None:
    """Remove the hook that the attachment of a pickled model has left."""
    for number, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _PickledAttachment):
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
