"""The start of workers: forked from a process that has imported torch (see `fork_server`), or each as a new Python.

The program's text decides, before anything runs; the process itself may still find why not.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...job.attempt import AttemptMembers
from ...job.deaths import describe_end
from ...job.spec import JobSpec
from ...job.worker_files import WorkerFiles
from .interrupts import Interrupted, Interrupts, block_signals
from .job import Job
from .program import source_of
from .worker import WORKER_FILE, python_command

_ANSWERS_WITHIN_S, _ENDS_WITHIN_S = 60.0, 1.0
_IMPORTS_BY_NAME = {"importlib", "runpy", "pkgutil"}
_CHANGE = ("setdefault", "update", "pop", "putenv", "unsetenv", "setenv")
# torch, its libraries and numpy's read variables of these names when they are loaded.
_READ_AT_LOAD = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_"),
    *("ATEN_", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
# Imported before the first worker is forked, where the text says that it will need them.
_NEEDS = {
    "photinus.trainer": re.compile(r"\bphotinus\b"),
    "photinus.backend.make_group": re.compile(r"\bphotinus\b"),
    "torch._dynamo": re.compile(r"\boptim|\bcompile\b|\bDistributedDataParallel\b|\bTrainer\b"),
}


class Forked:
    """A process that was forked for the launcher, and is its child: the part of Popen that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """Wait for its end, and return what `poll` does."""
        if self._code is None and (ended := os.waitpid(self.pid, options))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


class StartMethod:
    """The choice of how a job's workers start, and the launcher's end of the process that forks them. One thread."""

    def __init__(self, spec: JobSpec, interrupts: Interrupts, say: Callable[[str], object]) -> None:
        self._spec = spec
        self._interrupts = interrupts
        self._say = say
        self._modules = ["torch"]
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = self._decide() or None  # None: not known yet; empty: workers are forked

    def begin(self, job: Job) -> None:
        """Start the process that forks, where one is needed, in the environment of this job's workers; once."""
        if self._refusal or self._process is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program, mark = self._spec.program, f"fork:{theirs.fileno()}:{','.join(self._modules)}"
        words = [str(os.getpid()), mark, job.temporary, program.kind, program.target]
        environ = job.environ(AttemptMembers((job.local_world_size,), 0, 0, job.job_id, 0), 0)
        printed = [os.memfd_create(f"photinus-fork-{name}") for name in ("out", "err")]
        with theirs, block_signals():
            self._process = subprocess.Popen(
                [*python_command(), WORKER_FILE, *words, *program.arguments_of("LOCAL_RANK")],
                env=environ | WorkerFiles().environ(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed[0],
                stderr=printed[1],
                start_new_session=True,
            )
        for file in printed:
            os.close(file)

    def wait(self) -> str:
        """Wait until it is known why workers are not forked, and return that; empty if they are.

        Raises:
            Interrupted: a signal ends the job.
        """
        while self._refusal is None:
            ready = _readable([self._control.fileno(), self._interrupts.fd])
            self._interrupts.drain()
            if self._interrupts.received:
                raise Interrupted
            if self._control.fileno() in ready:
                answer = b""
                with contextlib.suppress(OSError):
                    answer = self._control.recv(4096)
                if answer:
                    self._refusal = answer[1:].decode()
                else:
                    self._lose()
        return self._refusal

    def fork(
        self, words: Sequence[str], environ: Mapping[str, str], streams: Sequence[int | None], module: str = ""
    ) -> Forked | None:
        """Fork a worker, or a process that runs `main` of a module; None: it has to be started another way.

        `streams`: as Popen's stdin, stdout and stderr; None is this process's own.

        Raises:
            OSError: no process can be started (a limit on processes or memory).
            Interrupted: a signal ends the job.
        """
        if self.wait():
            return None
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        order = {"words": words, "environ": dict(environ), "mask": mask, "module": module, "path": sys.path}
        reading, writing = os.pipe()
        with open(reading) as answers, open(os.devnull, "r+b") as nothing, open(os.memfd_create("order"), "w") as paper:
            json.dump(order, paper)
            paper.flush()
            null = nothing.fileno()
            ends = [fd if end is None else null if end == subprocess.DEVNULL else end for fd, end in enumerate(streams)]
            # It may have ended, or a stream of this process be closed.
            with open(writing, "w"), contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"fork"], [writing, paper.fileno(), *ends])
                assert self._process is not None
                self._process.send_signal(signal.SIGCONT)  # stopped by somebody, it would never answer
            answer = answers.read() if _readable([reading], _ANSWERS_WITHIN_S) else ""
        if answer.startswith("!"):
            raise OSError(number := int(answer[1:]), os.strerror(number))
        if answer:
            return Forked(int(answer))
        self._lose()
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()

    def _lose(self) -> None:
        """It ended, or does not answer: say so once, and go on without."""
        assert self._process is not None
        try:
            how = describe_end(self._process.wait(_ENDS_WITHIN_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            how = "does not answer"
        self._refusal = f"the process that forks workers (pid {self._process.pid}) {how}"
        self._say(f"photinus: {self._refusal}: they start without it, and import torch themselves\n")

    def _decide(self) -> str:
        program = self._spec.program
        if self._spec.start_method == "spawn":
            return "--start-method spawn"
        if program.kind == "program":
            return "--no-python"
        if sys.flags.verbose or "importtime" in sys._xoptions or os.environ.get("PYTHONPROFILEIMPORTTIME"):
            return "Python reports each worker's imports (-v, -X importtime)"
        try:
            source = source_of(program)
            text = importlib.util.decode_source(source.read_bytes()) if source is not None else "import torch"
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError):  # the worker will say what is wrong with it
            return ""
        if names := sorted({name for name in _variables_set(tree) if name.startswith(_READ_AT_LOAD)}):
            return f"the script sets {', '.join(names)}, which torch reads when it is loaded"
        if self._spec.start_method is None and _imports(tree) <= sys.stdlib_module_names - _IMPORTS_BY_NAME:
            return "the script imports only the standard library"
        self._modules += [module for module, needs in _NEEDS.items() if needs.search(text)]
        return ""


def _readable(descriptors: Sequence[int], within_s: float | None = None) -> list[int]:
    """Wait until some can be read, and return these. `select.select` takes none above 1023, as with 130 workers."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [ready for ready, _ in poll.poll(within_s and within_s * 1000)]


def _variables_set(tree: ast.AST) -> Iterator[str]:
    """Names of variables that a program may put into its environment: `os.environ["NAME"] = ...`, and its like."""
    for node in ast.walk(tree):
        names: list[ast.AST | None] = []
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            names = [node.slice]
        elif isinstance(node, ast.Dict):
            names = [*node.keys]
        elif isinstance(node, ast.Call):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
            names = [*node.args] if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGE else []
        yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


def _imports(tree: ast.AST) -> set[str]:
    """Return the first parts of the names of all modules that a text imports; "" for one of its own package."""
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += ["" if node.level else node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
