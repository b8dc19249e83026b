"""Two processes that train one model together, over gloo."""

import gc
import socket

import torch
import torch.multiprocessing as multiprocessing


def mean_of_two_ranks(train, *arguments):
    """What `train(rank, *arguments)`, a function of a module, returns on either rank: the mean of both tensors."""
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
    gc.collect()  # what is left of a wrapped model would outlive its process group, and end the process with it
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
