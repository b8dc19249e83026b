"""Trains runs in processes of one thread. A finished run is one file, so a stopped call goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from seqwarm_kernels.utils.files import write_atomically

from .settings import Setting

Record = dict[str, Any]  #: {"setting": Setting's fields, "figures": what `train` measured}


def path_of(folder: Path, setting: Setting) -> Path:
    return folder / f"{setting.name}.json"


def finished(folder: Path, settings: Iterable[Setting]) -> list[Record]:
    """The records of those runs that are finished."""
    paths = (path_of(folder, setting) for setting in settings)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def missing(folder: Path, settings: Iterable[Setting]) -> list[Setting]:
    return [setting for setting in dict.fromkeys(settings) if not path_of(folder, setting).exists()]


def run_all(
    work: Callable[[Setting], Record], folder: Path, settings: Sequence[Setting], jobs: int, title: str
) -> None:
    """Do `work` for what is missing, in this order. Each record is written when its work ends."""
    folder.mkdir(parents=True, exist_ok=True)
    left = missing(folder, settings)
    if not left:
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, tqdm(total=len(left), desc=title, unit="run") as bar:
        futures = {pool.submit(work, setting): setting for setting in left}
        try:
            for future in as_completed(futures):
                setting = futures[future]
                write_atomically(path_of(folder, setting), json.dumps(future.result(), allow_nan=False).encode())
                bar.set_postfix_str(setting.name)
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
