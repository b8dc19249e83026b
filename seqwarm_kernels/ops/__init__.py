"""The operators: schemas, plain references, and the other implementations that are available."""

from . import backends
from .alibi_attention import autograd as _autograd  # noqa: F401
from .alibi_attention import reference as _alibi_attention_reference  # noqa: F401
from .alibi_attention import schema as alibi_attention_schema
from .alibi_attention.validation import with_checked_values
from .library import shorten
from .moment_statistics import reference as _moment_statistics_reference  # noqa: F401
from .moment_statistics import schema as moment_statistics_schema
from .resize_batch import reference as _resize_batch_reference  # noqa: F401
from .resize_batch import schema as resize_batch_schema
from .resize_packed import reference as _resize_packed_reference  # noqa: F401
from .resize_packed import schema as resize_packed_schema

for _operator in ("alibi_attention", "alibi_attention_varlen"):
    if backends.module is not None:
        shorten(_operator, "native", getattr(backends.module, _operator))
    elif backends.problem("native") is None:
        shorten(_operator, "native", with_checked_values(_operator))
backends.load_triton(
    "seqwarm_kernels.ops.alibi_attention.triton",
    "seqwarm_kernels.ops.moment_statistics.triton",
    "seqwarm_kernels.ops.resize_batch.triton",
    "seqwarm_kernels.ops.resize_packed.triton",
)
for _operator in ("resize_batch", "resize_batch_out"):
    backends.register(_operator, resize_batch_schema.BACKENDS, lacking=resize_batch_schema.LACKING)
backends.register("resize_packed", resize_packed_schema.BACKENDS, lacking=resize_packed_schema.LACKING)
for _operator in ("alibi_attention", "alibi_attention_varlen"):
    backends.register(_operator, alibi_attention_schema.BACKENDS, lacking=alibi_attention_schema.LACKING)
backends.register("moment_statistics", moment_statistics_schema.BACKENDS)
