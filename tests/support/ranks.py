"""Processes that train together. They fork from a server that has imported the packages, instead of importing torch."""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import secrets
import socket
import traceback

import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(  # those that are not installed are left out
    [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "tokenizers",
        "accelerate",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "seqwarm_kernels.diagnostics",
        "pytest",
        "hypothesis",
    ]
)


def free_port():
    """A free port below those that systems hand out, so that no other socket gets it before it is used."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def run_ranks(function, *arguments, world_size=2):
    """Call function(rank, port, *arguments), a module-level function, in each process. An error in one is raised."""
    torch.multiprocessing.start_processes(
        function, args=(free_port(), *arguments), nprocs=world_size, start_method="forkserver"
    )


def set_environment(rank, port, world_size=2):
    """Sets what torchrun tells the processes of a world, and what Composer asks for besides."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def join_group(rank, port, world_size=2, timeout=None):
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timeout=timeout, rank=rank, world_size=world_size
    )


@contextlib.contextmanager
def one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # as in leave_group
        torch.distributed.destroy_process_group()


def leave_group():
    """Destroys the process group when all ranks are done: the end of rank 0 closes the store of the others."""
    gc.collect()  # a wrapped model that outlives its process group would abort the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_on_mesh(function, *arguments, world_size=2):
    """What function(mesh, *arguments), a module-level function, returns on each rank of a mesh, or the first error.

    The processes stay, for the calls of all tests. Each call starts with the same seed.
    """
    if world_size not in _MESHES:
        _MESHES[world_size] = _started(world_size)
    pipes = _MESHES[world_size]
    for pipe in pipes:
        pipe.send((function, arguments))
    answers = {}
    try:
        while len(answers) < world_size:
            for pipe in multiprocessing.connection.wait(set(pipes) - answers.keys()):
                error, answers[pipe] = pipe.recv()
                assert error is None, error
    except BaseException:  # other ranks may wait for the one that failed
        _stop(world_size)
        raise
    return [answers[pipe] for pipe in pipes]


_MESHES = {}  #: for each number of ranks: the pipes to them, by process


def _started(world_size):
    port, pipes = free_port(), {}
    for rank in range(world_size):
        pipe, end = SERVER.Pipe()
        pipes[pipe] = SERVER.Process(target=_serve, args=(rank, port, world_size, end), daemon=True)
        pipes[pipe].start()
        end.close()
    return pipes


def _stop(world_size):
    for process in _MESHES.pop(world_size).values():
        process.kill()
        process.join()


def _serve(rank, port, world_size, pipe):
    join_group(rank, port, world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ranks",))
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            torch.manual_seed(0)
            try:
                answer = None, function(mesh, *arguments)
            except BaseException:  # also pytest's own
                answer = traceback.format_exc(), None
            pipe.send(answer)
    os._exit(0)  # torch would warn of collectives that no check has waited for


def mean_of_two_ranks(train, *arguments):
    """The mean of the tensors that `train(rank, *arguments)`, a module-level function, returns on two ranks."""
    return torch.tensor(run_on_mesh(_numbers, train, arguments), dtype=torch.float64).mean(0).float()


def _numbers(mesh, train, arguments):
    """Plain ones: a tensor would be sent through shared memory."""
    return train(mesh.get_rank(), *arguments).tolist()
