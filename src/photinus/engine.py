"""The engine's Python face: collectives among processes, in shared memory and between hosts. Needs no torch.

    address = engine.new_address()                    # in one process; bring it to the others by any means
    with engine.Communicator(rank, world_size, address) as communicator:
        communicator.all_reduce(array, "avg")         # numpy arrays, or anything with the array interface

Arrays made over `allocate` lie in shared memory and are reduced where they lie; others go through slots, chunk by
chunk. The order of addition is fixed, so every run gives the same bits on every rank.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import _native, env
from ._native import Call, CudaDevice, Work
from .errors import HostError
from .group import ANY_RANK, DTYPES, OPERATIONS, REDUCTIONS, Group, Part, Place, facts
from .job.own_address import reaches_from

__all__ = [
    "ANY_RANK",
    "DTYPES",
    "OPERATIONS",
    "REDUCTIONS",
    "Call",
    "Communicator",
    "CudaDevice",
    "Part",
    "Place",
    "Work",
    "allocate",
    "call_site",
    "cuda_device",
    "explain",
    "host_id",
    "label",
    "listen",
    "network_id",
    "new_address",
    "pass_over_frames_of",
]


def pass_over_frames_of(paths: Sequence[str]) -> None:
    """Set which libraries lie between the user's program and the engine; replaces an earlier list.

    Messages quote the innermost line of the program outside of these. Photinus itself always counts as one.

    Args:
        paths: files, or folders that end with a slash.
    """
    _native.set_library_folders([os.path.dirname(os.path.abspath(__file__)) + os.sep, *paths])


pass_over_frames_of([])

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def new_address(at: Sequence[str] = ()) -> str:
    """Create the address of one group: printable text with the name of an abstract Unix socket and a 128-bit secret.

    One rank creates it and sends it to the others by any means (a store, an argument). Nothing appears in the file
    system. Only processes that have the address can join; on this host, only processes of the same user.

    Args:
        at: for ranks on several hosts: what `listen` returned on rank 0, which must then create the address. The other
            ranks listen on the network card that reaches rank 0, unless they listen already.
    """
    address: str = _native.new_address()
    return "@".join((address, *filter(None, [",".join(at)])))


def host_id() -> str:
    """Return a text that is equal for processes that can share memory: same boot, network namespace and user.

    PHOTINUS_HOST_ID overrides it.
    """
    return env.HOST_ID.get() or f"{network_id()}-{os.geteuid()}"


def network_id() -> str:
    """Return a text that is equal for processes that have loopback in common: same boot and network namespace."""
    try:
        with open(_BOOT_ID) as file:
            boot = file.read().strip()
    except OSError as error:
        if text := env.HOST_ID.get():
            return text
        raise HostError(
            f"{_BOOT_ID}, which identifies the host, cannot be read ({error.strerror}). Set {env.HOST_ID.name} to "
            f"a text that is equal on all ranks of a host, and different on each host."
        ) from None
    return f"{boot}-{os.stat(_NETWORK).st_ino}"


def listen(addresses: Sequence[str]) -> list[str]:
    """Open this process's listener for ranks of other hosts, on addresses of this host. It serves all groups.

    Args:
        addresses: IPv4 or IPv6 addresses, in digits. Only peers that know a group's address are let in.

    Returns:
        "ip:port" of each, for the `Place` of this process. The same addresses give the same result again.

    Raises:
        ValueError: a text is not an address, or the addresses are not those of the first call.
        HostError: this host does not have an address, or the process may open too few descriptors (ulimit -n).
    """
    found: list[str] = _native.listen(list(addresses))
    return found


def allocate(nbytes: int) -> memoryview:
    """Allocate bytes in this process's arena, which peers see. They are freed when the last view of them is dropped.

    Args:
        nbytes: number of bytes, at least 0. Memory is taken at the first touch. The contents are undefined.

    Raises:
        ValueError: nbytes is negative.
        HostError: the arena (address space of twice the machine's memory) has no gap of this size.
    """
    if nbytes < 0:
        raise ValueError(f"allocate({nbytes}): needs a number of bytes of at least 0")
    return memoryview(_native.ArenaBuffer(nbytes))


def cuda_device(index: int) -> CudaDevice:
    """Return the copy engines of a GPU. Calls on tensors in its memory name them as their `device`.

    A process has one such object per GPU, created at the first call, with the attributes `index` and `name`. The driver
    (CUDA 12.0 or newer) is looked for here and not before.

    Args:
        index: index of the GPU, as CUDA_VISIBLE_DEVICES counts.

    Raises:
        HostError: there is no driver, it is too old, there is no GPU, or it is another process's; says what to do.
        ValueError: there is no GPU with this index.
    """
    return _native.cuda_device(index)


def call_site() -> str:
    """Return the line of the user's program that runs now, as messages quote it ("train.py:41"); "" if unknown."""
    site: str = _native.call_site()
    return site


@contextmanager
def label(text: str) -> Iterator[None]:
    """Label this thread's collectives inside `with`, for example with the name of a parameter.

    If labels differ between ranks, the ranks get MismatchError. This finds tensors of equal size in different orders.
    It works for torch.distributed's calls on backend photinus too. At most 127 bytes are kept.

        with engine.label(name):
            dist.all_reduce(parameter.grad)
    """
    before = _native.set_label(text)
    try:
        yield
    finally:
        _native.set_label(before)


def explain(
    counts: Sequence[int],
    operation: str,
    sizes_elems: Sequence[int],
    dtype: str = "float32",
    *,
    speeds: tuple[float, float] = (0.0, 0.0),
) -> tuple[str, list[dict[str, Any]]]:
    """Return how calls on tensors in arenas would run on some hosts, which need not exist.

    Args:
        counts: number of ranks on each host.
        operation: name of a collective without parts.
        sizes_elems: sizes of the calls in elements, as `Communicator` counts them.
        speeds: speeds between the hosts, like `Communicator.speeds`; 0: those of the model in docs/scale.md.

    Returns:
        The list of levels with its reason, empty for one host; and for each size its algorithm, levels, kernels,
            seconds by the model, and the reason.
    """
    about, rows = _native.explain_hosts(
        list(counts), env.LEVELS.get(), speeds, OPERATIONS[operation], DTYPES[dtype], list(sizes_elems)
    )
    return about, [dict(zip(("algorithm", "levels", "kernels", "seconds", "reason"), row, strict=True)) for row in rows]


class Communicator(Group):
    """A group of ranks with its operations on arrays: numpy's, or anything with the array interface."""

    def __init__(self, rank: int, world_size: int, address: str, **options: Any) -> None:
        address, _, at = address.partition("@")
        if at and not options.get("places"):
            options["places"] = _meet(rank, world_size, address, at.split(","), options)
        super().__init__(rank, world_size, address, **options)

    def all_reduce(
        self,
        array: Any,
        reduction: str = "sum",
        *,
        factor: float = 1.0,
        label: str = "",
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks (same shape and type) into each of them, in the order of a binary tree over
        ranks.

        Args:
            reduction: a name in REDUCTIONS; `factor` is this rank's factor for "premul_sum".
            label: name of the array, such as a parameter's: ranks whose labels differ get MismatchError.
            wire_dtype: type of the values between hosts, for sums, averages and products. "bfloat16" or "float16" for
                float32: half the bytes, and still the same bits on all ranks. "float32" for these two: the bits of one
                host, 1.5 times the bytes. Equal on all ranks; no effect on one host.
        """
        block = facts(array, writable=True)
        return self._call("all_reduce", block, block[0], reduction, 0, asynchronous, array, factor, label, wire_dtype)

    def reduce(
        self,
        array: Any,
        root: int = 0,
        reduction: str = "sum",
        *,
        factor: float = 1.0,
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks into rank `root`'s, as all_reduce does. The other arrays stay as they are."""
        block = facts(array, writable=self.rank == root)
        root = self._root(root)
        return self._call("reduce", block, block[0], reduction, root, asynchronous, array, factor, "", wire_dtype)

    def all_to_all(self, outs: Sequence[Any], arrays: Sequence[Any], *, asynchronous: bool = False) -> Work:
        """Send arrays[r] to rank r and receive outs[r] from it. Sizes may differ from pair to pair."""
        return self._exchange("all_to_all", outs, arrays, 0, asynchronous)

    def gather(self, outs: Sequence[Any] | None, array: Any, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Send all ranks' arrays, which may differ in size, to rank `root`: into outs[r] there (None elsewhere)."""
        arrays: list[Any] = [None] * self.world_size
        arrays[self._root(root)] = array
        return self._exchange("gather", outs if self.rank == root else None, arrays, root, asynchronous)

    def scatter(self, out: Any, arrays: Sequence[Any] | None, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Send rank `root`'s arrays[r] (None elsewhere) to rank r. Sizes may differ."""
        outs: list[Any] = [None] * self.world_size
        outs[self._root(root)] = out
        return self._exchange("scatter", outs, arrays if self.rank == root else None, root, asynchronous)

    def all_gather_list(self, outs: Sequence[Any], array: Any, *, asynchronous: bool = False) -> Work:
        """Send all ranks' arrays, which may differ in size, to all ranks: rank r's into outs[r]."""
        return self._exchange("all_gather", outs, [array] * self.world_size, 0, asynchronous)

    def send(self, array: Any, peer: int, tag: int = 0, *, asynchronous: bool = False) -> Work:
        """Send an array to a rank, which must receive one of the same size and type. Done when the rank has it."""
        address, elems, dtype, _ = facts(array, writable=False)
        if peer < 0:
            raise ValueError(f"send: {peer} is not a rank of this group of {self.world_size}")
        return self.message(OPERATIONS["send"], address, elems, dtype, peer, tag, 0.0, asynchronous, array)

    def recv(self, array: Any, peer: int = ANY_RANK, tag: int = 0, *, asynchronous: bool = False) -> Work:
        """Receive an array from a rank, or from the first rank that sends with this tag (`Work.source_rank`)."""
        address, elems, dtype, _ = facts(array, writable=True)
        if peer < ANY_RANK:
            raise ValueError(f"recv: {peer} is not a rank of this group of {self.world_size}")
        return self.message(OPERATIONS["recv"], address, elems, dtype, peer, tag, 0.0, asynchronous, array)

    def broadcast(self, array: Any, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Copy rank `root`'s array into every rank's array."""
        block = facts(array, writable=self.rank != root)
        return self._call("broadcast", block, block[0], "sum", self._root(root), asynchronous, array)

    def all_gather(self, out: Any, array: Any, *, asynchronous: bool = False) -> Work:
        """Copy all ranks' arrays, in rank order, into `out` (world_size times as long)."""
        _, elems, dtype, _ = block = facts(array, writable=False)
        recv, room, out_dtype, _ = facts(out, writable=True)
        self._fits("all_gather", "out", room, out_dtype, elems * self.world_size, dtype)
        return self._call("all_gather", block, recv, "sum", 0, asynchronous, (out, array))

    def reduce_scatter(
        self,
        out: Any,
        array: Any,
        reduction: str = "sum",
        *,
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks and write this rank's part (1 / world_size of them) into `out`.

        `wire_dtype` is as in all_reduce, and nothing is rounded after the last addition.
        """
        recv, elems, dtype, _ = facts(out, writable=True)
        send, count, in_dtype, shape = facts(array, writable=False)
        self._fits("reduce_scatter", "array", count, in_dtype, elems * self.world_size, dtype)
        keep = (out, array)
        return self._call(
            "reduce_scatter", (send, elems, dtype, shape), recv, reduction, 0, asynchronous, keep, wire_dtype=wire_dtype
        )

    def barrier(self, *, asynchronous: bool = False) -> Work:
        """Wait until all ranks have called it."""
        return self.submit(Call(OPERATIONS["barrier"], asynchronous=asynchronous))

    def _call(
        self,
        operation: str,
        block: tuple[int, int, int, tuple[int, ...]],
        recv: int,
        reduction: str,
        root: int,
        asynchronous: bool,
        keep: object,
        factor: float = 1.0,
        label: str = "",
        wire_dtype: str | None = None,
    ) -> Work:
        if reduction not in REDUCTIONS:
            raise ValueError(f"{operation}: reduction {reduction!r} is unknown; known are {', '.join(REDUCTIONS)}")
        if wire_dtype is not None and wire_dtype not in DTYPES:
            raise ValueError(f"{operation}: wire_dtype {wire_dtype!r} is unknown; known are {', '.join(DTYPES)}")
        code, wire = REDUCTIONS[reduction], None if wire_dtype is None else DTYPES[wire_dtype]
        operation_code, (send, elems, dtype, shape) = OPERATIONS[operation], block
        call = Call(
            operation_code, send, recv, elems, dtype, code, root, 0.0, asynchronous, factor, label, 0, wire, shape
        )
        return self.submit(call, keep)

    def _exchange(
        self, operation: str, outs: Sequence[Any] | None, arrays: Sequence[Any] | None, root: int, asynchronous: bool
    ) -> Work:
        dtypes: set[int] = set()
        shapes: set[tuple[int, ...]] = set()

        def parts(buffers: Sequence[Any] | None, what: str, *, writable: bool) -> list[Part]:
            if buffers is None:
                buffers = [None] * self.world_size
            if len(buffers) != self.world_size:
                raise ValueError(
                    f"{operation}: {what} has {len(buffers)} arrays, needs one for each of {self.world_size} ranks"
                )
            found: list[Part] = []
            for array in buffers:
                if array is None:
                    found.append((0, 0))
                    continue
                address, elems, dtype, shape = facts(array, writable=writable)
                dtypes.add(dtype)
                shapes.add(shape)
                found.append((address, elems))
            return found

        recvs = parts(outs, "outs", writable=True)
        sends = parts(arrays, "arrays", writable=False)
        if len(dtypes) > 1:
            names = {code: name for name, code in DTYPES.items()}
            raise ValueError(f"{operation}: arrays of several types, {', '.join(sorted(names[d] for d in dtypes))}")
        dtype = dtypes.pop() if dtypes else 0
        shape = shapes.pop() if len(shapes) == 1 else None
        code = OPERATIONS[operation]
        call = Call(code, 0, 0, 0, dtype, 0, root, asynchronous=asynchronous, shape=shape, sends=sends, recvs=recvs)
        return self.submit(call, (outs, arrays))

    def _root(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not a rank of this group of {self.world_size}")
        return root

    def _fits(self, operation: str, what: str, elems: int, given_dtype: int, needed: int, dtype: int) -> None:
        if elems != needed or given_dtype != dtype:
            names = {code: name for name, code in DTYPES.items()}
            raise ValueError(
                f"{operation}: {what} has {elems} elements of {names[given_dtype]}, needs {needed} of {names[dtype]} "
                f"in a group of {self.world_size}"
            )


def _meet(rank: int, world_size: int, address: str, at: Sequence[str], options: dict[str, Any]) -> list[Place]:
    """Get the places of all ranks from rank 0, which listens at `at`."""
    try:
        links = _native.listen([])
    except ValueError:
        if rank == 0:
            raise
        links = listen([reaches_from(at[0].rpartition(":")[0].strip("[]"))])
    timeout_s = options.get("timeout_s")
    texts = _native.exchange_texts(
        rank,
        world_size,
        address,
        at,
        socket.gethostname()[:63],
        options.get("job", ""),
        options.get("attempt", 0),
        env.TIMEOUT_S.get() if timeout_s is None else timeout_s,
        json.dumps((host_id(), socket.gethostname(), os.getpid(), links)),
    )
    return [Place(*json.loads(each)) for each in texts]


def _about() -> dict[str, Any]:
    """Describe the engine on this machine."""
    return {
        "instruction_set": _native.instruction_set(),
        "usable_cores": _native.usable_cores(),
        "host_id": host_id(),
        "timeout_s": env.TIMEOUT_S.get(),
        "grace_s": env.GRACE_S.get(),
    }


if __name__ == "__main__":
    import sys

    # For the launcher, which starts programs and imports no engine: what the engine is here, or what `explain` answers
    # to the arguments in JSON that are given.
    print(json.dumps({"explained": explain(**json.loads(sys.argv[1]))} if sys.argv[1:] else _about()))
