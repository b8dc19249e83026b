"""Processes that train together. They fork from a server that has imported the packages, instead of importing torch."""

import contextlib
import gc
import multiprocessing
import os
import secrets
import socket
import traceback

import pytest
import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(  # those that are not installed are left out
    [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "tokenizers",
        "lightning.pytorch",
        "accelerate",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "seqwarm_kernels.diagnostics",
        "pytest",
        "hypothesis",
        "s3fs",
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


def leave_group():
    """Destroys the process group when all ranks are done: the end of rank 0 closes the store of the others."""
    gc.collect()  # a wrapped model that outlives its process group would abort the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_checks(checks, mesh, rank, folder):
    """Call each check(mesh) of (name, check) with the same seed. Its error becomes a file, and the others still run."""
    for name, check in checks:
        torch.manual_seed(0)
        try:
            check(mesh)
        except BaseException:  # also pytest's own
            (folder / f"{name}-{rank}").write_text(traceback.format_exc())


def assert_no_errors(folder, name):
    """No rank has written an error of this check."""
    found = [path.read_text() for path in folder.glob(f"{name}-*")]
    assert not found, "\n".join(found)


def errors_fixture(checks, dim_name=None):
    """A fixture: the folder of the errors of `checks()`, a module-level function, on a mesh of two ranks."""

    @pytest.fixture(scope="module")
    def errors(tmp_path_factory):
        folder = tmp_path_factory.mktemp("errors")
        run_ranks(_check, checks, dim_name, folder)
        return folder

    return errors


def _check(rank, port, checks, dim_name, folder):
    join_group(rank, port)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=dim_name and (dim_name,))
    run_checks(checks(), mesh, rank, folder)
    leave_group()


def mean_of_two_ranks(train, *arguments):
    """The mean of the tensors that `train(rank, *arguments)`, a module-level function, returns on two ranks."""
    queue = SERVER.SimpleQueue()
    run_ranks(_one, queue, train, arguments)
    return torch.tensor(queue.get())


def _one(rank, port, queue, train, arguments):
    join_group(rank, port)
    result = train(rank, *arguments)
    torch.distributed.all_reduce(result)
    if rank == 0:
        queue.put((result / 2).tolist())
    leave_group()
