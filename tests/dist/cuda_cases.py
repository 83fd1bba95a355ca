"""What ranks do with CUDA tensors over backend photinus, on a GPU or on what passes for one (tests.fake_cuda).

`Cases` does what a command says and returns what was found wrong. CPU tensors through the same group are the oracle.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from tests.fake_cuda import FakeGpu, RealGpu, wait_until

COMPUTED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
MOVED = (*COMPUTED, torch.uint16, torch.float8_e5m2, torch.complex128)
LAYOUTS = ("dense", "strided", "transposed")
SHAPES = ((3, 5), (0,), (1,), (2, 1031))
Make = Callable[[Tensor], Tensor]


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values, not dense in memory unless asked."""
    if layout == "strided":
        whole = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
        whole[..., ::2] = values
        return whole[..., ::2]
    if layout == "transposed":
        return values.movedim(0, -1).contiguous().movedim(-1, 0)
    return values.clone()


def values_of(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool or not (dtype.is_signed or dtype.is_complex):
        values = values.abs()
    return values.to(dtype) if dtype is not torch.bool else values > 3


class Cases:
    """See the module. FAKE_CUDA holds words for the fake driver; without it there is a GPU."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        words = os.environ.get("FAKE_CUDA")
        self.gpu: Any = RealGpu() if words is None else FakeGpu(words, float(os.environ.get("FAKE_KERNEL_S", "0")))
        store = dist.FileStore(os.environ["STORE_OF_TEST"], world_size)
        backend = os.environ.get("BACKEND_OF_TEST", "photinus")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))

    def __call__(self, command: dict[str, Any]) -> Any:
        rest = {name: value for name, value in command.items() if name != "do"}
        return getattr(self, command["do"])(**rest)

    # --- equal to the CPU's results --------------------------------------------------------------------------------

    def collectives(self, layout: str, dtypes: Sequence[str] = ()) -> list[str]:
        """All collectives and messages × element types × sizes in this layout; those whose bits differ."""
        wrong = []
        for dtype in MOVED if not dtypes else [getattr(torch, name) for name in dtypes]:
            for shape in SHAPES:
                for name, call in self._calls(dtype, shape, layout).items():
                    expected = call(lambda values: values)
                    got = [self.gpu.read(tensor) for tensor in call(self.gpu.tensor)]
                    for mine, theirs in zip(got, expected, strict=True):
                        if not _same(mine, theirs):
                            wrong.append(f"{name} of {dtype} {list(shape)} {layout}")
        return wrong

    def _calls(
        self, dtype: torch.dtype, shape: Sequence[int], layout: str
    ) -> dict[str, Callable[[Make], list[Tensor]]]:
        rank, size = self.rank, self.world_size
        right, left = (rank + 1) % size, (rank - 1) % size

        def of(seed: int, *first: int) -> Tensor:
            return laid_out(values_of([*first, *shape], dtype, seed), layout)

        def mine(*first: int) -> Tensor:
            return of(rank, *first)

        def room(*first: int) -> Tensor:
            return of(1000, *first)

        def uneven(r: int) -> Tensor:
            return laid_out(values_of([r + 1, *shape], dtype, r), layout)

        def all_reduce(op: Any) -> Callable[[Make], list[Tensor]]:
            def call(make: Make) -> list[Tensor]:
                tensor = make(mine())
                dist.all_reduce(tensor, op)
                return [tensor]

            return call

        def reduce(make: Make) -> list[Tensor]:
            tensor = make(mine())
            dist.reduce(tensor, size - 1)
            return [tensor]

        def reduce_scatter(make: Make) -> list[Tensor]:
            output, inputs = make(room()), [make(of(rank + size * r)) for r in range(size)]
            dist.reduce_scatter(output, inputs)
            return [output]

        def reduce_scatter_tensor(make: Make) -> list[Tensor]:
            output, tensor = make(room()), make(mine(size))
            dist.reduce_scatter_tensor(output, tensor)
            return [output]

        def broadcast(make: Make) -> list[Tensor]:
            tensor = make(mine())
            dist.broadcast(tensor, size - 1)
            return [tensor]

        def all_gather(make: Make) -> list[Tensor]:
            outputs = [make(torch.zeros_like(uneven(r))) for r in range(size)]
            dist.all_gather(outputs, make(uneven(rank)))
            return outputs

        def all_gather_into_tensor(make: Make) -> list[Tensor]:
            output = make(room(size))
            dist.all_gather_into_tensor(output, make(mine()))
            return [output]

        def gather(make: Make) -> list[Tensor]:
            outputs = [make(room()) for _ in range(size)] if rank == 0 else None
            dist.gather(make(mine()), outputs, dst=0)
            return outputs or []

        def scatter(make: Make) -> list[Tensor]:
            output = make(room())
            dist.scatter(output, [make(of(r)) for r in range(size)] if rank == 0 else None, src=0)
            return [output]

        def all_to_all(make: Make) -> list[Tensor]:
            outputs = [make(room()) for _ in range(size)]
            dist.all_to_all(outputs, [make(of(rank * size + r)) for r in range(size)])
            return outputs

        def all_to_all_single(make: Make) -> list[Tensor]:
            output = make(room(size))
            dist.all_to_all_single(output, make(mine(size)))
            return [output]

        def messages(make: Make) -> list[Tensor]:
            output = make(room())
            work = dist.isend(make(mine()), right)
            dist.recv(output, left)
            assert work is not None
            work.wait()
            return [output]

        calls: dict[str, Callable[[Make], list[Tensor]]] = {
            "broadcast": broadcast,
            "all_gather": all_gather,
            "all_gather_into_tensor": all_gather_into_tensor,
            "gather": gather,
            "scatter": scatter,
            "all_to_all": all_to_all,
            "all_to_all_single": all_to_all_single,
        }
        if size > 1:
            calls["send and recv"] = messages
        if dtype in COMPUTED:
            calls |= {
                "all_reduce": all_reduce(dist.ReduceOp.SUM),
                "reduce": reduce,
                "reduce_scatter": reduce_scatter,
                "reduce_scatter_tensor": reduce_scatter_tensor,
            }
            if not dtype.is_complex and dtype is not torch.bool:
                calls |= {f"all_reduce {op}": all_reduce(op) for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX)}
        if dtype in (torch.float32, torch.bfloat16):
            calls["all_reduce premul"] = all_reduce(dist._make_nccl_premul_sum(0.5))
        return calls

    def lazy(self) -> list[str]:
        """Conjugated and negated tensors, which are neither in memory."""
        wrong = []
        for name, turned in (("conj", Tensor.conj), ("neg", lambda z: z.conj().imag)):
            values = values_of((7,), torch.complex64, self.rank) * (1 + 2j)
            expected = turned(values.clone())
            got = turned(self.gpu.tensor(values))
            group: Any = dist.group.WORLD
            for tensor in (expected, got):
                group.allreduce([tensor]).wait()
            if not _same(self.gpu.read(got).resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg()):
                wrong.append(name)
        return wrong

    def sparse(self) -> list[str]:
        """Sums of sparse tensors, with another number of entries on each rank."""
        wrong = []
        for dtype in (torch.float32, torch.complex64):
            entries = self.rank + 1
            places = torch.arange(entries).unsqueeze(0) * 2
            tensor = torch.sparse_coo_tensor(places, values_of((entries, 3), dtype, self.rank), (10, 3))
            on_gpu = self.gpu.tensor(tensor)
            for each, asynchronous in ((tensor, False), (on_gpu, self.rank % 2 == 0)):
                work = dist.all_reduce(each, async_op=asynchronous)
                if work is not None:
                    work.wait()
            if not torch.equal(self.gpu.read(on_gpu.to_dense()), tensor.to_dense()):
                wrong.append(str(dtype))
        return wrong

    def groups(self) -> list[str]:
        """Parts of the world, and a coalesced call."""
        wrong = []
        alone = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        both = dist.new_group()
        for group, expected in ((alone, self.rank + 1.0), (both, sum(range(1, self.world_size + 1)))):
            tensor = self.gpu.tensor(torch.full((5,), self.rank + 1.0))
            dist.all_reduce(tensor, group=group)
            if self.gpu.read(tensor).tolist() != [expected] * 5:
                wrong.append(f"a group of {dist.get_world_size(group)}")
        pair = [self.gpu.tensor(torch.full((n,), self.rank + 1.0)) for n in (3, 4)]
        with dist._coalescing_manager(group=both, async_ops=True) as manager:
            for tensor in pair:
                dist.all_reduce(tensor, group=both)
        manager.wait()
        if any(self.gpu.read(t).unique().tolist() != [sum(range(1, self.world_size + 1))] for t in pair):
            wrong.append("coalesced")
        return wrong

    # --- order between streams ---------------------------------------------------------------------------------------

    def streams(self, repeats: int = 3) -> list[str]:
        """Calls on busy streams, and readers on others. Nobody synchronizes; those that saw other values."""
        wrong = []
        for turn in range(repeats):
            for strided in (False, True):
                for name in ("same", "other", "future", "then", "joined", "synchronous"):
                    if not self._one_order(name, strided, turn):
                        wrong.append(f"{name}{' strided' if strided else ''}")
        return wrong

    def _one_order(self, name: str, strided: bool, turn: int) -> bool:
        gpu, caller, reader = self.gpu, self.gpu.stream(), self.gpu.stream()
        with gpu.on(caller):
            whole = gpu.tensor(torch.zeros(2 * 40_000))
            x = whole[::2] if strided else whole[:40_000]
            gpu.delay(0.01)
            x.fill_(self.rank + 1.0 + turn)
            gpu.delay(0.02)
            total = sum(range(1, self.world_size + 1)) + turn * self.world_size
            if name == "joined":
                group: Any = dist.group.WORLD
                work = group.allreduce_coalesced([gpu.tensor(torch.zeros(3)), x])
            else:
                work = dist.all_reduce(x, async_op=name != "synchronous")
            if name == "synchronous":
                return bool((gpu.read(x) == total).all())
            if name == "same":
                work.wait()
                return bool((gpu.read(x) == total).all())
        with gpu.on(reader):
            if name == "other":
                work.wait()
            elif name == "then":
                doubled = work.get_future().then(lambda future: [future.value()[0] * 2])
                return bool((gpu.read(doubled.wait()[0]) == 2 * total).all())
            else:
                work.get_future().wait()
            return bool((gpu.read(x) == total).all())

    def dropped(self, repeats: int = 100) -> list[str]:
        """Works that nobody keeps or waits for, whose tensors' memory is given back and taken again at once."""
        gpu, reader, wrong = self.gpu, self.gpu.stream(), []
        for turn in range(repeats):
            size = 9000 + turn % 7  # more than the group keeps of its last works
            x = gpu.tensor(torch.full((size, 2), float(turn)))
            part = x[:, 0] if turn % 3 == 0 else x
            if turn % 4 == 1:
                dist.all_reduce(part, async_op=True)
            elif turn % 4 == 3:
                work = dist.all_reduce(part, async_op=True)
                with gpu.on(reader):
                    work.wait()
                del work
            elif self.world_size > 1:
                other = (self.rank + 1) % self.world_size if self.world_size == 2 else self.rank ^ 1
                if other < self.world_size:
                    dist.isend(part, other)
                    dist.irecv(gpu.tensor(torch.zeros(part.shape)), other)
            del x, part
            fresh = gpu.tensor(torch.full((size, 2), -1.0))
            if turn % 10 == 9:
                dist.barrier()
                if not bool((gpu.read(fresh) == -1).all()):
                    wrong.append(f"memory of call {turn} was written after it was given back")
        last = gpu.tensor(torch.ones(4))
        dist.all_reduce(last)
        if gpu.read(last).tolist() != [float(self.world_size)] * 4:
            wrong.append("the call behind them")
        return wrong

    def dropped_for_its_future(self) -> bool:
        """A strided result that is still on its way home when nothing but its future was kept."""
        gpu = self.gpu
        x = gpu.tensor(torch.full((2 * 40_000,), self.rank + 1.0))[::2]
        future = dist.all_reduce(x, async_op=True).get_future()
        with gpu.on(gpu.stream()):
            future.wait()
            for _ in range(30):  # each looks which calls' memory may go
                dist.all_reduce(gpu.tensor(torch.zeros(1)), async_op=True)
                time.sleep(0.001)
            return bool((gpu.read(x) == sum(range(1, self.world_size + 1))).all())

    def memory_comes_back(self) -> bool:
        """After wait() nothing of ours holds the tensors."""
        group: Any = dist.group.WORLD
        for _ in range(3):  # the group lets go what earlier commands left
            dist.all_reduce(self.gpu.tensor(torch.zeros(1)))
        group._recent.clear()
        gc.collect()
        before = self.gpu.bytes_held()
        for strided in (False, True):
            x = self.gpu.tensor(torch.zeros(30_000))
            x = x[::2] if strided else x
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            dist.all_reduce(x)
            del x, work
        group._recent.clear()
        return bool(self.gpu.bytes_held() <= before)

    def completion(self) -> list[bool]:
        """is_completed() turns true without wait(), after the copies, of a dense and of a strided tensor."""
        told = []
        for strided in (False, True):
            x = self.gpu.tensor(torch.ones(6000))
            x = x[::2] if strided else x
            self.gpu.delay(0.3)
            work = dist.all_reduce(x, async_op=True)
            early = work.is_completed()
            wait_until(work.is_completed)
            early = early and not strided  # whose copies the fake's host waits for
            told.append(not early and bool((self.gpu.read(x) == self.world_size).all()) and work.is_success())
        return told

    # --- errors ------------------------------------------------------------------------------------------------------

    def errors(self) -> dict[str, str]:
        """What is said of wrong calls. The group goes on."""
        on_gpu, on_cpu = self.gpu.tensor(torch.ones(4)), torch.ones(4)
        said = {}
        calls: dict[str, Callable[[], Any]] = {
            "both": lambda: dist.all_gather_into_tensor(torch.ones(4 * self.world_size), on_gpu),
            "ranks differ": lambda: dist.all_reduce(on_cpu if self.rank == 0 else on_gpu),
        }
        if isinstance(self.gpu, FakeGpu) or torch.cuda.device_count() > 1:
            other = self.gpu.tensor_elsewhere(torch.ones(4))
            calls["two GPUs"] = lambda: dist.all_to_all_single(other, on_gpu)
        for name, call in calls.items():
            try:
                call()
                said[name] = "nothing"
            except (ValueError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        dist.all_reduce(on_gpu)
        said["afterwards"] = str(self.gpu.read(on_gpu).tolist() == [float(self.world_size)] * 4)
        return said

    def loader_workers(self) -> list[Any]:
        """Workers of a loader, forked while a call is in flight: the samples they bring, and the call's result."""
        x = self.gpu.tensor(torch.full((40_000,), self.rank + 1.0))
        self.gpu.delay(0.05)
        work = dist.all_reduce(x, async_op=True)
        loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
        samples = [int(batch) for batch in loader]
        work.wait()
        total = sum(range(1, self.world_size + 1))
        return [samples == list(range(8)), bool((self.gpu.read(x) == total).all())]

    def large(self, elems: int) -> bool:
        """A sum whose every element is known."""
        x = torch.full((elems,), self.rank + 1.0, device=self.gpu.device)
        dist.all_reduce(x)
        return bool((x == sum(range(1, self.world_size + 1))).all())

    def capture(self) -> dict[str, Any]:
        """A call on a stream that is being captured; a capture beside a call in flight. On a GPU only."""
        x, y = self.gpu.tensor(torch.ones(1 << 22)), self.gpu.tensor(torch.zeros(8))
        dist.all_reduce(x)
        said = "nothing"
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.gpu.stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            y.add_(1)
            try:
                dist.all_reduce(y)
            except ValueError as error:
                said = str(error)
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        refused = y.tolist()
        work = dist.all_reduce(x, async_op=True)
        beside: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(beside):
            y.add_(1)
        beside.replay()
        work.wait()
        return {"said": said, "y": [refused, y.tolist()], "x": x.unique().tolist()}


def _same(a: Tensor, b: Tensor) -> bool:
    # Anew: what has one element may be contiguous with any stride, and has no view as bytes then.
    bits = [torch.cat([tensor.reshape(-1)]).view(torch.uint8) for tensor in (a, b)]
    return a.shape == b.shape and torch.equal(*bits)
