"""Attention to DTensors: the sharding rules of the operators, and the placements of a call's arguments.

Rows (the batch) and heads are independent, so each rank runs the operator on its own rows and heads, without an
exchange. Only the gradient of slopes that all rows share is a sum over ranks.

Importing this module registers the rules and loads torch.distributed.tensor, which takes half a second. It is imported
when the first DTensor comes. No other file uses `register_sharding`, which is experimental.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ..library import overload
from .dropout import dropout_offsets
from .schema import BACKENDS, DenseOptions, VarlenOptions

_Options = TypeVar("_Options", DenseOptions, VarlenOptions)

_ROWS, _HEADS = "rows", "heads"


def _placement(cut: str | None, name: str, shape: Sequence[int], is_packed: bool) -> Placement:
    """The placement of an argument or result of an operator when a mesh dimension cuts rows, heads or nothing."""
    dimension = None if cut is None or not shape else _dimension(cut, name.removeprefix("grad_"), shape, is_packed)
    return Replicate() if dimension is None else Shard(dimension)


def _dimension(cut: str, name: str, shape: Sequence[int], is_packed: bool) -> int | None:
    """The dimension of rows or heads, None if the tensor has none."""
    if name == "slopes":
        rows, heads = (None if len(shape) == 1 else 0), len(shape) - 1
    elif name in ("key_padding_mask", "query_start"):
        rows, heads = (0 if shape[0] > 1 else None), None  # one position may serve all rows
    elif name in ("cu_seqlens_q", "cu_seqlens_k"):
        rows, heads = None, None
    elif is_packed:
        rows, heads = None, 0 if name in ("lse", "log2_sum", "ranges", "dropout_seed") else 1
    else:
        rows, heads = 0, 1
    return rows if cut == _ROWS else heads


def _rule(operator: OpOverload) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """What `register_sharding` asks for: the placements of results and arguments that one mesh dimension may have."""
    names = [argument.name for argument in operator._schema.arguments]
    results = [result.name for result in operator._schema.returns]
    is_packed = "varlen" in operator._schema.name

    def rule(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        given = list(zip(names, arguments, strict=False))  # without trailing defaults
        shapes = {name: tuple(entry.shape) for name, entry in given if hasattr(entry, "shape")}
        by_name = dict(given)

        def accepted(cut: str | None) -> tuple[list[Any], list[Any]]:
            placements = [_placement(cut, name, shapes[name], is_packed) if name in shapes else None for name in names]
            outputs = [_placement(cut, name, shapes["query"], is_packed) for name in results]
            if "slopes_need_grad" in by_name:
                outputs[-1] = Replicate()  # without elements
                if by_name["slopes_need_grad"]:
                    outputs[-1] = _placement(cut, "slopes", shapes["slopes"], is_packed)
                    if cut == _ROWS and outputs[-1] == Replicate():
                        outputs[-1] = Partial("sum")
            return outputs, placements[: len(given)]

        return [accepted(cut) for cut in ((None, _HEADS) if is_packed else (None, _HEADS, _ROWS))]

    return rule


def _register() -> None:
    for name in ("alibi_attention", "alibi_attention_varlen"):
        for backend in BACKENDS:
            for operator in (overload(name, backend), overload(f"{name}_backward", backend)):
                register_sharding(operator)(_rule(operator))
                # torch remembers placements and shapes by the tensors, and by the other arguments from the first int
                # on. The shape of grad_slopes depends on a bool before.
                names = [argument.name for argument in operator._schema.arguments]
                if "slopes_need_grad" in names:
                    first = names.index("slopes_need_grad")
                    schema_info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
                    schema_info[operator] = RuntimeSchemaInfo(first)


_register()


def distribute(tensors: tuple[Tensor, ...], options: _Options) -> tuple[tuple[Tensor, ...], _Options]:
    """The arguments of a call on DTensors: checked, and with the placements that the query's ask for.

    Plain tensors among slopes and options are those of all rows and heads, the same on each rank.

    Args:
        tensors: query, key, value, slopes, of which the first three must be DTensors of the same placements.
        options: Options of the call.

    Raises:
        TypeError: A tensor is a DTensor, and another one that must be is not.
        ValueError: A placement or a number of heads or rows does not fit.
    """
    is_packed = isinstance(options, VarlenOptions)
    query: Any  # DTensors: mypy does not narrow tensors in a loop
    key: Any
    value: Any
    query, key, value, slopes = tensors
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor if another argument is one, got a plain tensor")
    cuts = _cuts(query, is_packed)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device_mesh != query.device_mesh or tensor.placements != query.placements:
            raise ValueError(
                f"{name} must have the query's mesh and placements {query.placements} on {query.device_mesh}, got "
                f"{tensor.placements} on {tensor.device_mesh}"
            )
    _check_divisible(query, key, cuts)

    def distributed(name: str, tensor: Tensor) -> Tensor:
        wanted = [_placement(cut, name, tensor.shape, is_packed) for cut in cuts]
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, query.device_mesh, [Replicate()] * len(cuts), run_check=False)
        elif tensor.device_mesh != query.device_mesh:
            raise ValueError(f"{name} must be on the query's mesh {query.device_mesh}, got {tensor.device_mesh}")
        for placement, goal in zip(tensor.placements, wanted, strict=True):
            if placement not in (goal, Replicate()):
                raise ValueError(
                    f"{name} must be replicated, or have the placements {tuple(wanted)} of the query's rows and heads, "
                    f"got {tensor.placements}"
                )
        return tensor if list(tensor.placements) == wanted else tensor.redistribute(placements=wanted)

    if options.dropout_seed is not None:
        head_offsets = _common_offsets(options.dropout_seed, query, 1 if is_packed else query.shape[0])
        options = options._replace(dropout_seed=head_offsets[0] if is_packed else head_offsets)
    placed: dict[str, Any] = {
        name: distributed(name, entry) for name, entry in options._asdict().items() if isinstance(entry, Tensor)
    }
    return (query, key, value, distributed("slopes", slopes)), options._replace(**placed)


def _common_offsets(seed: Tensor, query: DTensor, batch_size: int) -> Tensor:
    """The head offsets of all rows and heads, with one seed for the whole mesh, the largest of its ranks' seeds."""
    for dimension in range(query.device_mesh.ndim):
        seed = collectives.all_reduce(seed, "max", (query.device_mesh, dimension))
    return dropout_offsets(seed, batch_size, query.shape[1])


def _cuts(query: DTensor, is_packed: bool) -> list[str | None]:
    """What each mesh dimension cuts."""
    known = {Replicate(): None, Shard(1): _HEADS} | ({} if is_packed else {Shard(0): _ROWS})
    tokens = Shard(0) if is_packed else Shard(2)
    if tokens in query.placements:
        raise ValueError(
            f"query must hold all tokens on each rank, got the placements {query.placements} that shard the tokens: "
            "exchange tokens for heads by seqwarm_kernels.parallel.tokens_to_heads, or attend to shards by "
            "seqwarm_kernels.parallel.context_attention"
        )
    if not all(placement in known for placement in query.placements):
        which = "heads, Shard(1)" if is_packed else "rows, Shard(0), or heads, Shard(1)"
        raise ValueError(f"query must be replicated or sharded in its {which}, got the placements {query.placements}")
    return [known[placement] for placement in query.placements]


def _check_divisible(query: DTensor, key: DTensor, cuts: list[str | None]) -> None:
    ranks = {None: 1, _ROWS: 1, _HEADS: 1}
    for dimension, cut in enumerate(cuts):
        ranks[cut] *= query.device_mesh.size(dimension)
    if key.shape[1] % ranks[_HEADS]:
        raise ValueError(
            f"query must have heads that the mesh divides, got {query.shape[1]} query heads and {key.shape[1]} key "
            f"heads for {ranks[_HEADS]} ranks: each rank needs whole groups of a key head and its query heads"
        )
    if query.shape[0] < ranks[_ROWS]:
        raise ValueError(
            f"query must have a row for each of the {ranks[_ROWS]} ranks that its rows are sharded over, got "
            f"{query.shape[0]} rows"
        )
