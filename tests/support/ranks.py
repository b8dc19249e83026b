"""Two processes that train one model together over gloo."""

import gc
import socket

import torch
import torch.multiprocessing as multiprocessing


def mean_of_two_ranks(train, *arguments):
    """The mean of the tensors that `train(rank, *arguments)`, a module-level function, returns on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_one, args=(port, queue, train, arguments), nprocs=2)
    return torch.tensor(queue.get())


def _one(rank, port, queue, train, arguments):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    result = train(rank, *arguments)
    torch.distributed.all_reduce(result)
    if rank == 0:
        queue.put((result / 2).tolist())
    gc.collect()  # a wrapped model that outlives its process group would abort the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
