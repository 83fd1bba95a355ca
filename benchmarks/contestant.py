"""The ranks of one contestant: alive through the whole run, asleep in a read from a pipe unless it is their turn."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_RANK = Path(__file__).resolve().parent / "ranks" / "torch_rank.py"

Commands = Callable[[str], Sequence[tuple[Sequence[str], dict[str, str]]]]
"""(words, variables of the environment) of each process to start, given the folder of the pipes."""


def torch_ranks(backend: str, ranks: int) -> Commands:
    """The processes of a backend of torch.distributed, in the Python that runs this program."""

    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        lo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        words = [sys.executable, str(_RANK), backend]
        return [([*words, str(rank), str(ranks), folder], lo) for rank in range(ranks)]

    return commands


class Contestant:
    """Starts the ranks and gives them commands. A contestant that fails, or is late, is absent from then on.

    Args:
        name: for the report.
        commands: what to start.
        ranks: how many ranks these processes have.
        timeout_s: for each answer.
        absent: why it can not take part; None when it can.
        clean_up: called when all its ranks are ready, and when they have ended.

    `version` is what it is, in its own words. `used` is what rank 0 used per call of the last run, where its program
    says so: cpu_s (processor time), kernel_s (the part of it in the kernel), faults (page faults), peak_kib.
    """

    def __init__(
        self,
        name: str,
        commands: Commands,
        ranks: int,
        *,
        timeout_s: float = 180.0,
        absent: str | None = None,
        clean_up: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.absent = absent
        self.version = ""
        self.used: dict[str, float] = {}
        self._commands, self._ranks, self._timeout_s, self._clean_up = commands, ranks, timeout_s, clean_up
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []

    def start(self) -> None:
        """Starts the ranks and waits until they have met."""
        if self.absent is not None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="photinus-bench-")
        folder = self._folder.name
        for rank in range(self._ranks):
            for end, files in (("in", self._inputs), ("out", self._outputs)):
                os.mkfifo(f"{folder}/{rank}.{end}")
                # Open both ways, so that no open waits for the other side.
                files.append(os.open(f"{folder}/{rank}.{end}", os.O_RDWR | os.O_CLOEXEC))
        # Variables of a job inside of which this may run.
        own = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        for index, (words, environ) in enumerate(self._commands(folder)):
            with open(f"{folder}/{index}.log", "wb") as log:
                whole = {**own, "OMP_NUM_THREADS": "1", **environ}
                self._processes.append(
                    subprocess.Popen(words, env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
        answers = self._ask(None)
        if answers is not None:
            self.version = str(answers[0]["ready"])
            self._clean_up()

    def prepare(self, dtype: str, size_bytes: int) -> bool:
        """Makes tensors on all ranks; False when it is gone."""
        return self._ask(f"prepare {dtype} {size_bytes}") is not None

    def run(self, path: str, calls: int) -> float | None:
        """Seconds per call, those of the slowest rank; None when it is gone."""
        answers = self._ask(f"run {path} {calls}")
        if answers is None:
            return None
        self.used = {name: value for name, value in answers[0].items() if name != "s"}
        return max(float(answer["s"]) for answer in answers)

    def stop(self) -> None:
        """Ends the ranks: in order when they can, else by force. Nothing of them stays."""
        if self._folder is None:
            return
        if self.absent is None:
            self._tell("quit")
        deadline = time.monotonic() + 20
        for process in self._processes:
            if self.absent is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.terminate()  # mpirun hands it on to its ranks
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in (*self._inputs, *self._outputs):
            os.close(file)
        self._folder.cleanup()
        self._folder = None
        self._clean_up()

    def __enter__(self) -> Contestant:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _ask(self, line: str | None) -> list[dict[str, Any]] | None:
        """One answer of each rank; None when it is absent. `line` is None for what ranks say by themselves."""
        if self.absent is not None:
            return None
        if line is not None:
            self._tell(line)
        answers: dict[int, bytes] = dict.fromkeys(self._outputs, b"")
        deadline = time.monotonic() + self._timeout_s
        while waiting := [file for file, text in answers.items() if not text.endswith(b"\n")]:
            for file in select.select(waiting, [], [], max(0.0, min(0.25, deadline - time.monotonic())))[0]:
                answers[file] += os.read(file, 1 << 16)
                waiting = []
            if waiting and any(process.poll() is not None for process in self._processes):
                self._leave(self._exit_message())
                return None
            if waiting and time.monotonic() > deadline:
                late = [rank for rank, file in enumerate(self._outputs) if file in waiting]
                self._leave(f"no answer from ranks {late} within {self._timeout_s:g} s")
                return None
        return [json.loads(text) for text in answers.values()]

    def _tell(self, line: str) -> None:
        for file in self._inputs:
            os.write(file, f"{line}\n".encode())

    def _leave(self, why: str) -> None:
        self.absent = why
        self.stop()  # a rank whose peer is gone may spin

    def _exit_message(self) -> str:
        assert self._folder is not None
        index, ended = next((i, each) for i, each in enumerate(self._processes) if each.poll() is not None)
        log = Path(self._folder.name, f"{index}.log").read_text(errors="replace").splitlines()
        said = [line.strip() for line in log if re.search("[a-z]", line)] or ["it said nothing"]
        errors = [line for line in said if re.search("error|signal|kill|refuse|abort", line, re.IGNORECASE)]
        who = f"rank {index}" if len(self._processes) == self._ranks else "a process"
        return f"{who} ended with code {ended.returncode}: {(errors or said)[-1][:300]}"


_OF_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "PHOTINUS_WORLD_SIZE"})
