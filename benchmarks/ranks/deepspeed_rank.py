"""A rank that calls DeepSpeed's shared-memory operator: deepspeed_rank.py RANK WORLD_SIZE FOLDER

Path: ordinary. RANK, MASTER_ADDR and so on must be in the environment: DeepSpeed reads them. Without other arguments it
only builds the operator.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import rank_loop
import torch
import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op


def main(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", rank=rank, world_size=world_size)
    # Through DeepSpeed's Python it falls back to gloo in silence; called by its name it cannot.
    all_reduce = torch.ops.deepspeed.inference_all_reduce_
    rank_loop.pin(rank)
    tensor = torch.zeros(1)

    def prepare(dtype_name: str, size_bytes: int) -> None:
        nonlocal tensor
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
        tensor = torch.zeros(1)
        tensor = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype)
        ones = torch.ones(1024, dtype=dtype)
        all_reduce(ones)
        if not bool((ones == world_size).all()):
            raise RuntimeError("DeepSpeed's operator added wrongly")
        dist.barrier()

    version = f"deepspeed {deepspeed.__version__} shm operator in torch {torch.__version__}"
    rank_loop.serve(rank, folder, version, prepare, lambda path: lambda: all_reduce(tensor), dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        build_shm_op()
    else:
        assert int(os.environ["RANK"]) == int(sys.argv[1])
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
