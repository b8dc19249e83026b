"""Batches by length: a hard budget of tokens, exact restarts, the same number for every rank."""

from .chunk_files import ChunkError
from .chunk_source import ChunkSource
from .chunks import write_chunks
from .collate import PackedCollator, PaddedCollator
from .loader import ResumableLoader
from .nested import batch_state
from .pieces import PieceDataset, cut_item
from .plan import Piece, Plan
from .planner import BatchPlanner
from .prepare import Prepare
from .progress import progress_bar
from .sampler import LengthBatchSampler
from .sequence_source import SequenceSource
from .source import Source
from .stream import LengthBatchStream
from .stream_source import StreamSource

__all__ = [
    "BatchPlanner",
    "ChunkError",
    "ChunkSource",
    "LengthBatchSampler",
    "LengthBatchStream",
    "PackedCollator",
    "PaddedCollator",
    "Piece",
    "PieceDataset",
    "Plan",
    "Prepare",
    "ResumableLoader",
    "SequenceSource",
    "Source",
    "StreamSource",
    "batch_state",
    "cut_item",
    "progress_bar",
    "write_chunks",
]
