"""The ranks of one backend: alive through the whole run, asleep unless it is their turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Contestant", "ContestantError"]

_RANK = Path(__file__).with_name("rank.py")


class ContestantError(Exception):
    """A backend that can not go on; the text says why, in its own words."""


class Contestant:
    """Starts the ranks and gives them commands; each answer has a deadline.

    Args:
        backend: of torch.distributed, or "copy".
        ranks: number of processes.
        dtype: of the tensors.
        timeout_s: for each command.
        device: where the tensors lie, "cpu" or "cuda"; nccl's always on GPUs.
    """

    def __init__(self, backend: str, ranks: int, dtype: str, timeout_s: float, device: str = "cpu") -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="photinus-bench-")
        self._logs = [open(Path(self._folder.name, f"{rank}.log"), "w+b") for rank in range(ranks)]  # noqa: SIM115
        environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PHOTINUS_WORLD_SIZE"):
            environ.pop(name, None)  # of a job inside of which this may run
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(_RANK), backend, str(rank), str(ranks), self._folder.name, dtype, device],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[rank],
            )
            for rank in range(ranks)
        ]

    def wait_until_ready(self) -> None:
        """Returns when all ranks have met.

        Raises:
            ContestantError: one failed, or the time is over.
        """
        self._answers()

    def prepare(self, operation: str, elems: int) -> None:
        """Makes tensors on all ranks. Raises ContestantError."""
        self._ask(f"prepare {operation} {elems}")

    def run(self, calls: int) -> float:
        """Seconds per call, those of the slowest rank. Raises ContestantError."""
        return max(float(answer["s"]) for answer in self._ask(f"run {calls}"))

    def calls_for(self, seconds: float) -> int:
        """How many calls last about so long."""
        once = max(self.run(1), 1e-7)
        few = max(1, min(50, int(seconds / 5 / once)))
        return max(2, min(20_000, int(seconds / max(self.run(few), 1e-7))))

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the ranks: by their own end where they listen, else by force. Nothing of them stays."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended before
                process.stdin.close()  # the end of the commands
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(timeout=max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for log in self._logs:
            log.close()
        self._folder.cleanup()

    def _ask(self, line: str) -> list[dict[str, Any]]:
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank) from None
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        texts = [b""] * len(self._processes)
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while not all(text.endswith(b"\n") for text in texts):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [rank for rank, text in enumerate(texts) if not text.endswith(b"\n")]
                    raise ContestantError(f"no answer from ranks {late} within {self._timeout_s:g} s")
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        raise self._failure(key.data)
                    texts[key.data] += part
        return [json.loads(text.splitlines()[-1]) for text in texts]

    def _failure(self, rank: int) -> ContestantError:
        try:
            code = self._processes[rank].wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        self._logs[rank].seek(0)
        said = [line for line in self._logs[rank].read().decode(errors="replace").splitlines() if line.strip()]
        return ContestantError(f"rank {rank} ended with code {code}: {said[-1][:300] if said else 'it said nothing'}")
