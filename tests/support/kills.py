"""Trainings that are killed at a random moment, and resumed."""

import random
import shutil
import time
import traceback

import pytest

from .ranks import SERVER, free_port, set_environment

#: One kill in the tests of every change, many in the longest tests.
KILLS = [1, pytest.param(20, marks=pytest.mark.exhaustive)]


def assert_kills_change_nothing(folder, train, assert_same_end, *, kills, ranks=1, context=SERVER):
    """Kill a training at `kills` random moments, each time a new one, and resume it. It ends as one without a kill.

    Args:
        folder: an empty folder.
        train: a module-level function. train(folder) starts the training in a folder, or resumes it there.
        assert_same_end: assert_same_end(folder, other) compares the results of two trainings.
        ranks: number of processes that train together.
        context: starts them. The server of ranks imports torch and the trainers first; a fork has them.
    """
    whole = folder / "whole"
    server_started = context.Process(target=time.time)
    server_started.start()
    server_started.join()
    start = time.monotonic()
    run(train, whole, ranks, context)
    seconds = time.monotonic() - start
    killed = 0
    while killed < kills:
        moment = random.uniform(0, seconds)
        out = folder / f"killed {killed} after {moment:.4f} of {seconds:.4f} seconds"  # the name shows in failures
        if kill_after(moment, train, out, ranks, context):
            killed += 1
        run(train, out, ranks, context)
        assert_same_end(whole, out)
        shutil.rmtree(out)


def run(train, folder, ranks, context):
    """Train to the end."""
    processes = _start(train, folder, ranks, context)
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    _kill(processes)
    errors = [path.read_text() for path in folder.glob("error *.txt")]
    assert codes == [0] * ranks, "\n".join([folder.name, f"exit codes {codes}", *errors])


def kill_after(seconds, train, folder, ranks, context):
    """Train, and kill all ranks after some time. Returns whether they were still training."""
    processes = _start(train, folder, ranks, context)
    time.sleep(seconds)
    _kill(processes)
    codes = {process.exitcode for process in processes}
    lost_others = {1} if ranks > 1 else set()  # ranks that lost the connection to a rank that was killed before them
    assert codes <= {0, -9} | lost_others, codes
    return -9 in codes


def _start(train, folder, ranks, context):
    folder.mkdir(exist_ok=True)
    port = free_port()
    processes = [context.Process(target=_train, args=(train, folder, rank, ranks, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def _train(train, folder, rank, ranks, port):
    if ranks > 1:
        set_environment(rank, port, ranks)
    try:
        train(folder)
    except BaseException:
        (folder / f"error {rank}.txt").write_text(traceback.format_exc())
        raise


def _kill(processes):
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
