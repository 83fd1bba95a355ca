"""A rank of Open MPI, MPICH or Intel MPI, under its mpirun: mpi_rank.py FOLDER

Path: ordinary. float32 alone: MPI has no bfloat16.
"""

from __future__ import annotations

import sys

import numpy
import rank_loop
from mpi4py import MPI


def main(folder: str) -> None:
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    rank_loop.pin(rank)
    array = numpy.zeros(1, dtype=numpy.float32)

    def prepare(dtype_name: str, size_bytes: int) -> None:
        nonlocal array
        assert dtype_name == "float32"
        array = numpy.zeros(1, dtype=numpy.float32)  # frees the old one before the new one is made
        array = numpy.full(size_bytes // 4, 0.0, dtype=numpy.float32)
        world.Barrier()

    version = " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split())
    rank_loop.serve(
        rank, folder, version, prepare, lambda path: lambda: world.Allreduce(MPI.IN_PLACE, array), world.Barrier
    )


if __name__ == "__main__":
    main(sys.argv[1])
