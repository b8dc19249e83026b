"""ALiBi attention on many devices."""

from .balance import RankWork, balanced_slopes, rank_work
from .context_attention import context_attention, context_attention_varlen, halo_widths
from .context_batches import ContextBatches
from .context_parallel import ContextParallel, sharded_by
from .shard_sequence import shard_sequence
from .tensor_parallel import ShardSlopes
from .ulysses import heads_to_tokens, local_heads, tokens_to_heads

__all__ = [
    "ContextBatches",
    "ContextParallel",
    "RankWork",
    "ShardSlopes",
    "balanced_slopes",
    "context_attention",
    "context_attention_varlen",
    "halo_widths",
    "heads_to_tokens",
    "local_heads",
    "rank_work",
    "shard_sequence",
    "sharded_by",
    "tokens_to_heads",
]
