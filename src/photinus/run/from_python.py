"""`photinus.launch`: one function in several processes, from a script or a notebook.

The function travels by value (cloudpickle), so it may be defined anywhere: in a notebook's cell, under `if __name__ ==
"__main__"`, inside another function. The processes are those of `photinus run`, fresh ones, so what this process has
done with CUDA or threads does not matter to them.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

import cloudpickle

from .. import env
from ..errors import LaunchError
from ..job.deaths import Raised
from ..job.world import name_ranks, read_scheduler
from .function import read_answers
from .local.worker import python_command
from .ssh.command import safe_path

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_END_S = 10.0
_PIECE_BYTES = 64 << 10


def launch(
    main: Callable[..., T],
    *,
    nprocs: int | str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    cpu: bool = False,
    oversubscribe: bool = False,
) -> list[T]:
    """Run `main(*args, **kwargs)` in several processes on this host. Return the result of each rank, in rank order.

        def train(lr):
            with photinus.init() as world:
                ...
                return accuracy

        accuracies = photinus.launch(train, nprocs=2, args=(0.1,))

    A process gets its rank as under `photinus run` (`photinus.init`, or RANK, WORLD_SIZE, ...). Rank 0's output appears
    unchanged. Lines of other ranks begin with the rank. This works in notebooks too.

    Args:
        main: any function that cloudpickle can send, with everything that it uses.
        nprocs: number of processes; or "auto" (one per GPU, or per usable core without GPUs), "gpu", "cpu".
        args, kwargs: arguments of `main`, the same on every rank.
        max_restarts: restart all ranks, at most N times, when one fails. Default: 0.
        cpu: hide the GPUs from the processes.
        oversubscribe: allow more than 4 processes per core on CPUs.

    Raises:
        TypeError: main is not callable.
        ValueError: nprocs or max_restarts is out of range, or the call cannot be pickled; the message quotes why.
        LaunchError: a rank failed and no restart was left; the message quotes the first cause. Or this process is
            itself a rank of a job, or one of several tasks of srun or mpirun.
    """
    _check(main, nprocs, max_restarts)
    try:
        call = cloudpickle.dumps((main, tuple(args), dict(kwargs or {})))
    except Exception as error:
        name = getattr(main, "__qualname__", type(main).__name__)
        raise ValueError(
            f"cannot send {name} and its arguments to other processes: {error}. Create what cannot be sent (locks, "
            f"open files, process groups, loggers with sockets) inside the function."
        ) from error
    _warn_of_cuda()
    with _memory_file("call") as call_file, _memory_file("answers") as answers:
        pickle.dump(sys.path, call_file)
        call_file.write(call)
        call_file.flush()
        command = [*python_command(), *safe_path(), "-m", "photinus", "run", "--standalone"]
        command += ["--nproc-per-node", str(nprocs)]
        command += ["--max-restarts", str(max_restarts), *(["--cpu"] if cpu else [])]
        command += ["--oversubscribe"] if oversubscribe else []
        command += [] if "torch" in sys.modules else ["--start-method", "spawn"]  # they may well do without it, too
        command += ["-m", "photinus.run.function"]
        command += [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (call_file, answers)]
        code = run_launcher(command)
        last = read_answers(answers)
    if code != 0:
        raise LaunchError(_first_error(last, code), exit_code=code)
    if early := [rank for rank, (kind, _) in last.items() if kind != "result"]:
        name = getattr(main, "__qualname__", type(main).__name__)
        raise LaunchError(f"{name_ranks(early, 8)} exited with code 0 before {name} returned: let it return")
    return [cloudpickle.loads(data) for _, data in last.values()]


def _memory_file(what: str) -> BinaryIO:
    return open(os.memfd_create(f"photinus-launch-{what}"), "w+b")


def _check(main: object, nprocs: int | str, max_restarts: int) -> None:
    if not callable(main):
        raise TypeError(f"launch needs a function, got {type(main).__name__}; pass its arguments as args=(...)")
    wrong = isinstance(nprocs, bool) or (
        nprocs < 1 if isinstance(nprocs, int) else nprocs not in ("auto", "gpu", "cpu")
    )
    if wrong:
        raise ValueError(f"nprocs={nprocs!r}: needs a whole number above 0, or 'auto', 'gpu' or 'cpu'")
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts}: needs 0 or more")
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            f"this process is already rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} of a job (RANK and "
            f"WORLD_SIZE are set). launch would start {nprocs} more processes per rank. Start the script with plain "
            f"`python`, or keep the launcher and do not call launch."
        )
    place = read_scheduler(os.environ)
    if place is not None and (place.world_size or 1) > 1 and env.EXPECTED_WORLD_SIZE.get() is None:
        raise LaunchError(
            f"{place.launcher} started {place.world_size} processes ({place.names[1]}); this is one of them. launch "
            f"would start {nprocs} more in each, as separate trainings. Do not call launch: then "
            f"{place.launcher}'s processes are the ranks. Or start one process. If you want separate trainings, set "
            f"{env.EXPECTED_WORLD_SIZE.name}=1."
        )


def _warn_of_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        mib = torch.cuda.memory_reserved() / (1 << 20)
        warnings.warn(
            f"this process uses CUDA, and keeps {mib:.0f} MiB of a GPU on which a rank will train. The ranks are new "
            f"processes, so they work. If GPU memory is short, restart this process before you call launch.",
            stacklevel=3,
        )


def run_launcher(command: list[str]) -> int:
    """Runs the launcher with its output where this process's goes, and ends it with us."""
    # A notebook's sys.stdout is no file: what the launcher writes has to be carried there.
    carried = not (_is_file(sys.stdout, 1) and _is_file(sys.stderr, 2))
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    sys.stdout.flush()
    sys.stderr.flush()
    libc = ctypes.CDLL(None)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if carried else None,
        stderr=subprocess.STDOUT if carried else None,
        # Ctrl-C in a terminal would reach it beside ours, and two of them leave the ranks no time.
        start_new_session=True,
        # The launcher ends in order, with all its ranks, when this process is killed.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
    ) as process:
        try:
            if carried:
                assert process.stdout is not None
                # Progress bars: pass each update on, not only whole lines.
                while piece := os.read(process.stdout.fileno(), _PIECE_BYTES):
                    sys.stdout.write(decode(piece))
                    sys.stdout.flush()
            code = process.wait()
            return 128 - code if code < 0 else code
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                rest = process.communicate(timeout=_END_S)[0]
                sys.stdout.write(decode(rest or b""))
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _is_file(stream: Any, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)
    except (AttributeError, OSError, ValueError):  # a notebook's or a test's stand-in
        return False


def _first_error(answers: Mapping[int, tuple[str, bytes]], code: int) -> str:
    """The earliest failure that a rank could write down and that is not only another's consequence, if there is one."""
    found = []
    for rank, (kind, data) in answers.items():
        raised = Raised.from_json(data.decode()) if kind == "error" else None
        if raised is not None and raised.raised_at_s is not None:
            found.append((raised.lost_a_peer, raised.raised_at_s, rank, raised.traceback))
    if not found:
        return f"the job failed with exit code {code}; the output of the ranks is above"
    *_, rank, text = min(found)
    return f"rank {rank} failed with {text} (exit code {code}; its traceback is above)"
