"""Problems of resize_batch, and its implementation and peers, for CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.self_check.calls import METHODS

from ..common.timing import Call

Batch = dict[str, Tensor]

TRUNCATIONS = ("truncate", "truncate, last token kept")

OURS = "resize_batch"
OURS_OUT = "resize_batch, out=BatchBuffers"
OURS_VIEWS = "resize_batch, copy=False"
BY_HAND = "slice + contiguous"
FOREACH = "torch._foreach_copy_ to own storage"
COMPILED = "torch.compile of slice + contiguous"
VIEWS = "bare views"


@dataclass(frozen=True)
class Resizing:
    """One problem: int64 tensors (rows, tokens) with an attention mask and labels, resized to rows of `length`."""

    tensors: int
    rows: int
    tokens: int
    length: int
    method: str

    def case(self) -> str:
        return f"{self.method}, {self.tensors} x {self.rows} x {self.tokens} int64 to {self.length}"

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "source_megabytes": self.tensors * self.rows * self.tokens * 8 / 1e6}

    def moved_megabytes(self) -> float:
        """Megabytes that have to be read and written, at least."""
        kept = self.length if self.method in TRUNCATIONS else self.tokens // self.length * self.length
        return 2 * self.tensors * self.rows * kept * 8 / 1e6

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        names = ["input_ids", "attention_mask", "labels", *(f"tensor_{index}" for index in range(3, self.tensors))]
        batch = {name: torch.randint(1000, (self.rows, self.tokens), device=device) for name in names[: self.tensors]}
        valid = torch.randint(1, self.tokens + 1, (self.rows, 1), device=device)
        batch["attention_mask"] = (torch.arange(self.tokens, device=device) < valid).long()
        return batch


def problems(sizes: list[tuple[int, int, int, int]]) -> Iterator[Resizing]:
    """Every method at each size (tensors, rows, tokens, length). Lengths of reshape leave a remainder of tokens."""
    for tensors, rows, tokens, length in sizes:
        for method in METHODS:
            yield Resizing(tensors, rows, tokens, length if method in TRUNCATIONS else length * 3 // 4, method)


def by_hand(batch: Batch, length: int, method: str) -> Batch:
    """The Python code that resize_batch replaces. Returns new, contiguous tensors."""
    cut = _BY_HAND[method]
    last = _last_tokens(batch["attention_mask"], length) if method == "truncate, last token kept" else None
    return {name: cut(tensor, length, -100 if name == "labels" else 0, last) for name, tensor in batch.items()}


class _LastTokens(NamedTuple):
    rows: Tensor
    source: Tensor
    target: Tensor


def _last_tokens(mask: Tensor, length: int) -> _LastTokens:
    last = mask.sum(1) - 1
    return _LastTokens(torch.arange(len(mask), device=mask.device), last, last.clamp(max=length - 1))


def _truncate(tensor: Tensor, length: int, *_: Any) -> Tensor:
    return tensor[:, :length].contiguous()


def _keep_last(tensor: Tensor, length: int, _: int, last: _LastTokens) -> Tensor:
    kept = tensor[:, :length].contiguous()
    kept[last.rows, last.target] = tensor[last.rows, last.source]
    return kept


def _reshape(tensor: Tensor, length: int, *_: Any) -> Tensor:
    return tensor[:, : tensor.shape[1] // length * length].reshape(-1, length)


def _pad(tensor: Tensor, length: int, fill: int, _: Any) -> Tensor:
    return functional.pad(tensor, (0, -tensor.shape[1] % length), value=fill).view(-1, length)


def _overlap(tensor: Tensor, length: int, fill: int, _: Any) -> Tensor:
    whole = tensor.shape[1] // length * length
    last = tensor[:, None, -length:]
    if fill:  # labels
        last = last.clone()
        last[:, :, : length - (tensor.shape[1] - whole)] = fill
    return torch.cat([tensor[:, :whole].unflatten(1, (-1, length)), last], dim=1).flatten(0, 1)


def _flatten(tensor: Tensor, length: int, *_: Any) -> Tensor:
    return tensor.view(-1)[: tensor.numel() // length * length].view(-1, length).clone()


_BY_HAND: dict[str, Callable[..., Tensor]] = {
    "truncate": _truncate,
    "truncate, last token kept": _keep_last,
    "reshape": _reshape,
    "reshape, padded": _pad,
    "reshape, overlapping": _overlap,
    "flatten": _flatten,
}


def views_of(batch: Batch, length: int, method: str) -> Batch | None:
    """Views of the batch, or None if strides cannot express the result of the method."""
    view = _VIEWS.get(method)
    return None if view is None else {name: view(tensor, length) for name, tensor in batch.items()}


_VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "truncate": lambda tensor, length: tensor[:, :length],
    "reshape": lambda tensor, length: tensor[:, : tensor.shape[1] // length * length].unflatten(1, (-1, length)),
    "flatten": lambda tensor, length: tensor.view(-1)[: tensor.numel() // length * length].view(-1, length),
}


def with_backend(implementation: str, backend: str | None) -> str:
    """The name of an implementation on one backend, or on the default backend."""
    return implementation if backend is None else implementation.replace(OURS, f"{OURS} {backend}")


def implementations(
    problem: Resizing, batch: Batch, *, compiled: bool, backend: str | None = None
) -> dict[str, Callable[[], Call]]:
    """Functions that each prepare and return a call to time, by name. resize_batch comes first."""
    length, method = problem.length, problem.method
    options = METHODS[method]

    def new() -> Call:
        return lambda: resize_batch(batch, length, backend=backend, **options)

    def out() -> Call:
        buffers = BatchBuffers(batch, length, mode=options["mode"], remainder=options.get("remainder", "drop"))
        return lambda: resize_batch(batch, length, out=buffers, backend=backend, **options)

    def foreach() -> Call:
        targets = list(by_hand(batch, length, method).values())

        def call() -> Batch:
            views = views_of(batch, length, method)
            assert views is not None
            shaped = [target.view(view.shape) for target, view in zip(targets, views.values(), strict=True)]
            torch._foreach_copy_(shaped, list(views.values()))
            return dict(zip(batch, targets, strict=True))

        return call

    def compile_by_hand() -> Call:
        torch._dynamo.reset()
        function = torch.compile(by_hand, dynamic=False)
        return lambda: function(batch, length, method)

    makers: dict[str, Callable[[], Call]] = {with_backend(OURS, backend): new, with_backend(OURS_OUT, backend): out}
    makers[BY_HAND] = lambda: lambda: by_hand(batch, length, method)
    if views_of(batch, length, method) is not None:
        makers[FOREACH] = foreach
    if compiled:
        makers[COMPILED] = compile_by_hand
    if method in ("truncate", "flatten"):  # the other methods always copy
        makers[OURS_VIEWS] = lambda: lambda: resize_batch(batch, length, copy=False, **options)
        makers[VIEWS] = lambda: lambda: views_of(batch, length, method)
    return makers
