"""What one run of PyTorch's suite is run with: the backend, how the suite sees it, the DDP class and the devices."""

from __future__ import annotations

from dataclasses import dataclass

DDP_CLASSES = {
    "torch": "torch.nn.parallel.distributed:DistributedDataParallel",
    "photinus": "photinus:DistributedDataParallel",
}
"""Short names; any other `module:Class` is taken as it stands."""


@dataclass(frozen=True)
class Plan:
    """One run of the suite.

    Args:
        backend: what `init_process_group` gets.
        world_size: ranks of each test.
        like: the suite decides by the backend's name what to run and to expect. It takes the branches of this one.
        answers_as: what `torch.distributed.get_backend` says of the backend's groups; None: the truth. Some functions
            of torch.distributed refuse, by that name alone, what the backend can do.
        ddp: DDP_CLASSES' short name, or module:Class, of what stands in place of torch's DistributedDataParallel.
        cuda_on_cpu: tests that want CUDA devices run on CPU (see cuda_on_cpu.py).
        hosts: for each rank what it takes for its host (PHOTINUS_HOST_ID), as in "aabb"; None: all are on one.
    """

    backend: str
    world_size: int
    like: str = "gloo"
    answers_as: str | None = None
    ddp: str = "torch"
    cuda_on_cpu: bool = False
    hosts: str | None = None

    def __post_init__(self) -> None:
        if self.hosts is not None and len(self.hosts) != self.world_size:
            raise ValueError(f"hosts={self.hosts!r} needs one letter for each of {self.world_size} ranks")

    @property
    def ddp_class(self) -> str:
        return DDP_CLASSES.get(self.ddp, self.ddp)

    @property
    def oracle(self) -> str:
        """Which tests the suite offers under this plan, as a key of the baseline: what gloo and torch's DDP pass."""
        return f"{'cuda on cpu' if self.cuda_on_cpu else 'cpu'}, world {self.world_size}"

    def __str__(self) -> str:
        words = [self.backend]
        if self.like != "gloo":
            words.append(f"like {self.like}")
        if self.answers_as is not None:
            words.append(f"under {self.answers_as}'s name")
        words.append(f"{self.ddp} DDP")
        if self.cuda_on_cpu:
            words.append("CUDA tests on CPU")
        where = f" on hosts {self.hosts}" if self.hosts is not None else ""
        return f"{', '.join(words)}, {self.world_size} ranks{where}"
