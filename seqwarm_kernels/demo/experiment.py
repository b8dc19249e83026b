"""Both runs, one after the other on the same machine, with a checkpoint at every evaluation."""

from __future__ import annotations

from tqdm.auto import tqdm

from .records import RUNS, Record
from .report_folder import Checkpoint, ReportFolder
from .settings import Settings
from .text import Corpus
from .training import Trainer


def run_both(folder: ReportFolder, settings: Settings, corpus: Corpus) -> list[Record]:
    """Every evaluation of both runs, continued from the folder's checkpoint."""
    checkpoint = folder.load()
    records = checkpoint.records
    for run in RUNS:
        done = [record for record in records if record.run == run]
        if done and done[-1].tokens == settings.total_tokens:
            continue
        trainer = Trainer(run, settings, corpus)
        print(f"{run}: {trainer.warm_allocator()}")
        if done and checkpoint.trainer is not None:
            trainer.load_state_dict(checkpoint.trainer)
        bar = tqdm(total=settings.total_tokens, initial=trainer.tokens, desc=run, unit=" tokens", unit_scale=True)
        with bar:
            for record in trainer.train(bar):
                records.append(record)
                folder.save(Checkpoint(records, trainer.state_dict()))
                bar.write(_line(record))
    return records


def _line(record: Record) -> str:
    train_loss = "     -" if record.train_loss is None else f"{record.train_loss:6.3f}"
    return (
        f"{record.run:<9}{record.tokens:>12,} tokens {record.seconds:>8.1f} s  "
        f"length {record.seq_length:>5}  train loss {train_loss}  "
        f"validation loss {record.validation_loss:6.3f}"
    )
