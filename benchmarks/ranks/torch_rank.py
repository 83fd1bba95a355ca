"""A rank that calls torch.distributed.all_reduce: torch_rank.py BACKEND RANK WORLD_SIZE FOLDER

Paths: ordinary, and with backend photinus also arena.
"""

from __future__ import annotations

import sys

import rank_loop
import torch
import torch.distributed as dist


def main(backend: str, rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    # This thread only: gloo's own threads, started above, stay free to run on the other cores.
    rank_loop.pin(rank)
    group = dist.group.WORLD
    assert group is not None
    tensors: dict[str, torch.Tensor] = {}

    def prepare(dtype_name: str, size_bytes: int) -> None:
        tensors.clear()
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
        elems = size_bytes // dtype.itemsize
        tensors["ordinary"] = torch.zeros(elems, dtype=dtype)
        if backend == "photinus":
            tensors["arena"] = group.allocate_tensor((elems,), dtype=dtype).zero_()  # type: ignore[attr-defined]
        dist.barrier()

    version = f"torch {torch.__version__}"
    if backend == "photinus":
        import importlib.metadata

        version = f"photinus {importlib.metadata.version('photinus')} in {version}"
    rank_loop.serve(rank, folder, version, prepare, lambda path: lambda: dist.all_reduce(tensors[path]), dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
