"""Rank processes that stay alive and run one command after another, for tests with hundreds of examples.

    with RankPool("tests.parity.engine_cases:Answers", world_size=3) as pool:
        answers = pool.ask({"elems": 5})      # the same command to every rank; its answers by rank

The name is of a class (or function) that each rank calls with rank, world_size and an engine address and that returns
something callable: what it returns for a command, a JSON value, is the answer. An exception there comes back as a
RankError with every rank's answer, and the pool lives on; a rank that dies or does not answer in time ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from photinus import engine
from tests.fork_server import fork_python


class RankError(AssertionError):
    """A command failed on a rank; the message holds every rank's answer and what it wrote."""


class RankPool:
    """Starts the ranks at once; `ask` waits for their answers, each time for at most `timeout_s`."""

    def __init__(
        self, answers: str, *, world_size: int, timeout_s: float = 60.0, environ: Mapping[str, str] | None = None
    ) -> None:
        self.world_size, self.timeout_s, self.is_broken = world_size, timeout_s, False
        address = engine.new_address()
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(world_size)]  # noqa: SIM115 - closed at exit
        self._commands: list[IO[bytes]] = []
        self._answers: list[IO[bytes]] = []
        self._processes = []
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        for rank, log in enumerate(self._logs):
            (stdin, commands), (replies, stdout) = os.pipe(), os.pipe()
            words = [answers, str(rank), str(world_size), address]
            process = fork_python(
                "tests.rank_pool:main", words, environ=environ, stdin=stdin, stdout=stdout, stderr=log
            )
            os.close(stdin)
            os.close(stdout)
            self._processes.append(process)
            self._commands.append(open(commands, "wb", buffering=0))  # noqa: SIM115 - closed with the pool
            self._answers.append(open(replies, "rb", buffering=0))  # noqa: SIM115 - closed with the pool

    def ask(self, command: Any) -> list[Any]:
        """The ranks' answers to one command."""
        line = json.dumps(command).encode() + b"\n"
        texts = [b""] * self.world_size
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, (commands, replies) in enumerate(zip(self._commands, self._answers, strict=True)):
                try:
                    commands.write(line)
                except BrokenPipeError:
                    self._give_up(command, f"rank {rank} is gone")
                selector.register(replies, selectors.EVENT_READ, rank)
            while not all(text.endswith(b"\n") for text in texts):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [rank for rank, text in enumerate(texts) if not text.endswith(b"\n")]
                    self._give_up(command, f"ranks {late} did not answer within {self.timeout_s} s")
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        self._give_up(command, f"rank {key.data} ended")
                    texts[key.data] += part
        answers = [json.loads(text) for text in texts]
        if any("error" in answer for answer in answers):
            shown = "\n".join(f"----- rank {r}: {a.get('error', 'no error')}" for r, a in enumerate(answers))
            raise RankError(f"{command}:\n{shown}")
        return [answer["value"] for answer in answers]

    def _give_up(self, command: Any, why: str) -> None:
        self.is_broken = True
        self.close(kill=True)
        outputs = []
        for rank, log in enumerate(self._logs):
            log.seek(0)
            outputs.append(f"----- rank {rank}: exit code {self._processes[rank].returncode}\n{log.read()}")
        raise RankError(f"{command}: {why}\n" + "\n".join(outputs))

    def close(self, *, kill: bool = False) -> None:
        """Ends the ranks: their input ends, and those that do not end of it are killed."""
        for process, commands in zip(self._processes, self._commands, strict=True):
            if kill:
                process.kill()
            commands.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=self.is_broken)
        for file in (*self._answers, *self._logs):
            file.close()


def main(answers: str, rank: str, world_size: str, address: str) -> None:
    # Not even what C++ writes gets between the answers.
    replies = open(os.dup(1), "w")  # noqa: SIM115 - until this process ends
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    module, name = answers.split(":")
    answer = getattr(importlib.import_module(module), name)(int(rank), int(world_size), address)
    for line in sys.stdin:
        try:
            reply = {"value": answer(json.loads(line))}
        except Exception:  # noqa: BLE001 - it travels to the test
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
