"""The package's Gluon kernels of attention on CPU threads, with small tiles. Their own host side launches them."""

from types import SimpleNamespace

import torch
from triton.experimental.gluon import language as gl

from seqwarm_kernels.ops.alibi_attention import (
    gluon,
    gluon_backward_key,
    gluon_backward_query,
    gluon_blocks,
    gluon_forward,
    gluon_tiles,
    schema,
    triton,
    triton_backward_ranges,
    triton_tiles,
)
from seqwarm_kernels.ops.alibi_attention.triton_configurations import GluonTiles
from seqwarm_kernels.ops.triton_launch import Launch
from tests.support.gluon import launch

ROWS = 16  # of a consumer, half of a program's
TILES = GluonTiles(16, 2, 0, 0, 16, 16, 2, 0)
KERNELS = ["gluon_forward_kernel", "gluon_backward_query_kernel", "gluon_backward_key_kernel"]


class Hopper:
    """A CPU that attends as a GPU of capability 9.0, until `monkeypatch` is undone."""

    def __init__(self, monkeypatch):
        self.launched = {}  # the last launch of each Gluon kernel, by its name
        self._patch = monkeypatch.setattr
        for module in (gluon, gluon_backward_key, gluon_backward_query, gluon_blocks, gluon_forward, gluon_tiles):
            self._patch(module, "ROWS", gl.constexpr(ROWS))
        for module in (gluon_blocks, triton_backward_ranges, triton_tiles):
            self._patch(module, "_RANGE_BLOCK", gl.constexpr(ROWS))
        self._patch(schema, "RANGE_BLOCK", ROWS)
        self._patch(gluon, "_BLOCK", 2 * ROWS)
        self._patch(gluon, "Launch", self._prepare)
        self._patch(gluon, "_tiles_of", self._tiles_of)
        self._patch(triton, "is_short", lambda *_, **__: False)
        self._patch(triton, "decodes", lambda *_: False)
        self.use()

    def use(self, tiles=TILES, multiprocessors=2, seed=0):
        """Take these tiles, as many programs in a launch, and schedules of this seed from now on."""
        self.tiles, self.seed = tiles, seed
        properties = SimpleNamespace(multi_processor_count=multiprocessors)
        self._patch(torch.cuda, "get_device_properties", lambda _: properties)
        self._patch(triton, "_known", type(triton._known)())

    def _tiles_of(self, query, key, options):
        """Those of any length and dtype."""
        plain = isinstance(options, schema.DenseOptions) and options.key_padding_mask is None
        return self.tiles if plain and options.dropout_seed is None else None

    def _prepare(self, kernel, programs, **fixed):
        """In place of `Launch`."""
        if kernel.fn.__name__ not in KERNELS:
            return Launch(kernel, programs, **fixed)  # in Triton's interpreter
        fixed.pop("num_warps")

        def start(*changing):
            arguments = dict(zip(kernel.arg_names, changing, strict=False))
            assert not arguments.keys() & fixed.keys()
            launched = self.launched[kernel.fn.__name__] = Launched(kernel, programs, arguments | fixed)
            launched.run(self.seed)

        return start


class Launched:
    """A launch that can be repeated."""

    def __init__(self, kernel, programs, arguments):
        self.kernel, self.programs, self.arguments = kernel, programs, arguments
        tensors = {name: getattr(value, "base", value) for name, value in arguments.items()}
        self.tensors = {name: value.detach() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        self._before = self.contents()

    def contents(self):
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def run(self, seed):
        for name, before in self._before.items():
            self.tensors[name].copy_(before)
        launch(self.kernel, (self.programs,), self.arguments, seed=seed)
