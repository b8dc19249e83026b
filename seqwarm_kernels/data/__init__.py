"""Batches by length: a hard budget of tokens, exact restarts, and the same number of batches on every rank."""

from .batch_planning.plan import Piece, Plan
from .batch_planning.planner import BatchPlanner
from .files.compression import read_uncompressed
from .files.reader import ChunkError
from .files.remote import visible_files
from .files.writer import write_chunks
from .loading.collate import PackedCollator, PaddedCollator
from .loading.prepare import ItemDataset, PieceDataset, Prepare, cut_item
from .loading.progress_bar import progress_bar
from .loading.resumable_loader import ResumableLoader
from .samplers.sampler import LengthBatchSampler
from .samplers.state import batch_state
from .samplers.stream import LengthBatchStream
from .sources.base import Order, Source
from .sources.chunk_source import ChunkSource
from .sources.document_source import MDSSource, MegatronSource, TokenSource
from .sources.parquet_source import ParquetSource, count_lengths
from .sources.sequence_source import SequenceSource
from .sources.stream_source import StreamSource

__all__ = [
    "BatchPlanner",
    "ChunkError",
    "ChunkSource",
    "ItemDataset",
    "LengthBatchSampler",
    "LengthBatchStream",
    "MDSSource",
    "MegatronSource",
    "Order",
    "PackedCollator",
    "PaddedCollator",
    "ParquetSource",
    "Piece",
    "PieceDataset",
    "Plan",
    "Prepare",
    "ResumableLoader",
    "SequenceSource",
    "Source",
    "StreamSource",
    "TokenSource",
    "batch_state",
    "count_lengths",
    "cut_item",
    "progress_bar",
    "read_uncompressed",
    "visible_files",
    "write_chunks",
]
