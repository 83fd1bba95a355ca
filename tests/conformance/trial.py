"""Runs one test of the suite on its ranks: forked processes, one deadline, nothing left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.testing._internal.common_distributed as common

from tests.conformance import cuda_on_cpu
from tests.conformance.suite import Suite

GRACE_S = 5.0
"""Once a rank has failed, how long the others have to end of it before they are ended."""
SHOWN_CHARACTERS = 6000
LOG_PREFIX = re.compile(r"^\[rank\d+\]:[A-Z]\d{4} .*?\] ", re.MULTILINE)
FORK = multiprocessing.get_context("fork")
SKIPS = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Args:
        status: "pass", "skip", "fail" or "timeout".
        seconds: what it took.
        why: the reason of a skip; of a failure, every rank's exit code and output.
        ddp: whether it made the DDP class.
        group: whether it made a group of the backend, if that is one of torch's plugins.
    """

    status: str
    seconds: float
    why: str
    ddp: bool
    group: bool


def run(suite: Suite, name: str, timeout_s: float) -> Outcome:
    """The outcome of one test. Every process that it started has ended, and its files are gone, when this returns."""
    test = getattr(suite.case, name)
    if getattr(test, "__unittest_skip__", False):
        return Outcome("skip", 0.0, test.__unittest_skip_why__, False, False)
    suite.marks.clear()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        for inner in ("barrier", "test_dir", "init_dir"):
            Path(folder, inner).mkdir()
        ranks = [
            FORK.Process(target=_rank, args=(suite, name, rank, folder, os.getpid()), name=f"{name}-{rank}")
            for rank in range(suite.plan.world_size)
        ]
        try:
            for process in ranks:
                process.start()
            late = _wait(ranks, started + timeout_s)
        finally:
            _end(ranks)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.close()
        status, why = _judge(codes, late)
        if status in ("fail", "timeout"):
            parts = [_shown(Path(folder, f"{rank}.log"), rank, code) for rank, code in enumerate(codes)]
            why = "\n".join([why, *parts])
    return Outcome(status, round(time.monotonic() - started, 2), why, suite.marks.ddp, suite.marks.group)


def _wait(ranks: list[Any], deadline: float) -> list[int]:
    """Waits until all ranks ended, one failed and the grace is over, or the deadline; who was late."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    ends = deadline
    while running:
        ready = multiprocessing.connection.wait(list(running), timeout=max(0.0, ends - time.monotonic()))
        if not ready:
            return sorted(running.values()) if ends == deadline else []
        for sentinel in ready:
            process = ranks[running.pop(sentinel)]  # type: ignore[index]
            process.join()
            if process.exitcode not in (0, *SKIPS):
                ends = min(ends, time.monotonic() + GRACE_S)
    return []


def _end(ranks: list[Any]) -> None:
    """Ends the ranks and what they started: each leads a process group of its own."""
    for process in ranks:
        if process.pid is None:
            continue
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all gone, or not yet a leader
            process.kill()
        process.join()


def _judge(codes: list[int | None], late: list[int]) -> tuple[str, str]:
    if late:
        return "timeout", f"ranks {late} had not ended at the deadline"
    # Where only some ranks skip, rank 0 speaks for all, as in torch's own runner.
    if codes[0] in SKIPS and all(code == 0 or code in SKIPS for code in codes):
        return "skip", SKIPS[codes[0]]
    if any(codes):
        return "fail", f"exit codes by rank: {codes}"
    return "pass", ""


def _shown(log: Path, rank: int, code: int | None) -> str:
    text = LOG_PREFIX.sub("", log.read_text(errors="replace")) if log.exists() else "(it never began)"
    if len(text) > SHOWN_CHARACTERS:
        text = "… " + text[-SHOWN_CHARACTERS:]
    return f"----- rank {rank}, exit code {code}:\n{text}"


def _rank(suite: Suite, name: str, rank: int, folder: str, runner: int) -> None:
    """A rank's process, from its beginning to its end."""
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the runner
    if os.getppid() != runner:
        os._exit(1)
    log = os.open(os.path.join(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # What is printed has to reach the log even if the process is ended.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(TEMP_DIR=folder, TMPDIR=folder, RANK=str(rank), PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    if suite.plan.hosts is not None:
        os.environ["PHOTINUS_HOST_ID"] = suite.plan.hosts[rank]
    tempfile.tempdir = folder
    suite.module.INIT_METHOD = f"file://{folder}/init_dir/again"  # type: ignore[attr-defined] - to make a group anew
    if suite.plan.cuda_on_cpu:
        cuda_on_cpu.enter(suite.module, suite.plan.world_size)
    # The suite tells its runner of an error through a pipe, and prints it. multiprocessing makes SystemExit the code.
    heard, said = FORK.Pipe()
    with heard:
        suite.case._run(rank, name, os.path.join(folder, "store"), said)  # type: ignore[attr-defined]
