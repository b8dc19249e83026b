"""What `resize_batch` finds out once about batches of one kind: all that does not depend on the length asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_batch import validation
from ..ops.resize_batch.schema import LACKING, Kind, new_rows, output_shapes


class Options(NamedTuple):
    """How a batch is to be cut, whatever the length."""

    mode: str
    remainder: str
    seq_dim: int
    keep_last_token: bool
    pad_values: Mapping[str, float] | None
    keys: Collection[str] | None
    mask_keys: Collection[str] | None
    backend: str | None


@dataclass(frozen=True, eq=False)
class Recipe:
    """A checked kind of call."""

    rule: str
    batch_size: int
    source_length: int
    names: tuple[str, ...]  #: of the tensors that take part
    kinds: list[int]  #: those of the schema; plain numbers cost the operator less
    fill_values: list[float]
    mask_name: str | None
    row_lists: list[str]  #: lists and tuples that are repeated as rows are
    rearranged: bool  #: whether the operator takes some tensor in another shape than the batch holds it
    needs_gradient: str | None  #: a tensor that requires one
    backend: str | None
    dtype: torch.dtype | None  #: one that not every backend has
    device_type: str

    def rows(self, length: int) -> int:
        return new_rows(self.batch_size, self.source_length, length, self.rule)

    def length(self, seq_len: int) -> int:
        return min(seq_len, self.source_length)

    def shapes(self, tensors: list[Tensor], length: int, return_info: bool) -> list[tuple[int, ...]]:
        """What the operator writes: the shape of every output, those of the info included."""
        return output_shapes(tensors, self.kinds, self.rows(length), length, return_info)

    def run(
        self,
        tensors: list[Tensor],
        attention_mask: Tensor | None,
        seq_len: int,
        return_info: bool,
        outputs: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """New tensors, or the outputs, written. `tensors` are as the operator takes them; none for the info alone."""
        sizes = (self.batch_size, self.source_length, seq_len)
        kinds, fill_values = self.kinds[: len(tensors)], self.fill_values[: len(tensors)]
        arguments = (tensors, attention_mask, *sizes, self.rule, kinds, fill_values, return_info)
        if outputs is None:
            return overload("resize_batch", self._serving("resize_batch", self.device_type))(*arguments)
        device_type = outputs[0].device.type
        overload("resize_batch_out", self._serving("resize_batch_out", device_type))(*arguments, outputs)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(outputs)  # so that autograd sees what it saved overwritten
        return outputs

    def _serving(self, operator: str, device_type: str) -> str:
        return backends.choose(operator, device_type, self.backend, self.dtype)


#: Recipes by what a batch and a call look like. A training run has one or two.
_recipes: dict[Any, Recipe] = {}
_MOST_RECIPES = 256


def recipe_for(leaves: Mapping[str, Any], options: Options) -> Recipe:
    """The recipe of a batch, checked once.

    Raises:
        TypeError, ValueError: the batch or an option is not what `resize_batch` takes.
    """
    if torch.compiler.is_compiling():  # traced once, and its shapes may be symbols
        return _make_recipe(leaves, options)
    try:
        signature = tuple([_described(name, leaf) for name, leaf in leaves.items()]), _hashable(options)
        recipe = _recipes.get(signature)
    except TypeError:  # a name or an option without a hash, or sizes that are symbols
        return _make_recipe(leaves, options)
    if recipe is None:
        recipe = _make_recipe(leaves, options)
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[signature] = recipe
    return recipe


def _hashable(options: Options) -> tuple[Any, ...]:
    if options.pad_values is None and options.keys is None and options.mask_keys is None:
        return options
    pad_values = options.pad_values and tuple((name, repr(value)) for name, value in options.pad_values.items())
    names = [value if value is None or isinstance(value, str) else tuple(value) for value in options[5:7]]
    return *options[:4], pad_values, *names, options.backend  # the text of a value tells 0.0 from -0.0


def _described(name: str, leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return name, leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return (name, len(leaf)) if validation.is_list(leaf) else (name,)  # type: ignore[arg-type]


def _make_recipe(leaves: Mapping[str, Any], options: Options) -> Recipe:
    rule = validation.resizing_rule(options.mode, options.remainder, options.keep_last_token)
    validation.check_names("pad_values", options.pad_values, leaves)
    layout = validation.batch_layout(
        leaves, mode=options.mode, seq_dim=options.seq_dim, keys=options.keys, mask_keys=options.mask_keys
    )
    mask_name = validation.row_mask_name(leaves, layout, options.seq_dim)
    validation.check_keep_last(rule, mask_name)
    tensors = {name: leaves[name] for name in layout.kinds}
    kinds = [int(kind) for kind in layout.kinds.values()]
    return Recipe(
        rule=rule,
        batch_size=layout.batch_size,
        source_length=layout.source_length,
        names=tuple(layout.kinds),
        kinds=kinds,
        fill_values=[
            validation.fill_value(name, kind, leaves[name].dtype, options.pad_values, rule)
            for name, kind in layout.kinds.items()
        ],
        mask_name=mask_name,
        row_lists=layout.row_lists,
        rearranged=options.seq_dim != 1 or Kind.SQUARE in kinds,
        needs_gradient=next((name for name, tensor in tensors.items() if tensor.requires_grad), None),
        backend=options.backend,
        dtype=_rare_dtype([tensor.dtype for tensor in tensors.values()]),
        device_type=next(iter(tensors.values())).device.type,
    )


def _rare_dtype(dtypes: list[torch.dtype]) -> torch.dtype | None:
    lacking = {dtype for lacked in LACKING.values() for dtype in lacked}
    return next((dtype for dtype in dtypes if dtype in lacking), None)
