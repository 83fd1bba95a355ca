"""photinus.launch: one function in several processes, from Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import photinus
from photinus.errors import LaunchError, PeerLostError
from tests.fork_server import REPOSITORY


def run_script(folder: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def place(factor: int) -> tuple[int, int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), factor * int(os.environ["RANK"])


def test_each_rank_gets_the_arguments_and_its_result_comes_back_in_order() -> None:
    assert photinus.launch(place, nprocs=3, kwargs={"factor": 10}) == [(0, 3, 0), (1, 3, 10), (2, 3, 20)]


def test_a_script_needs_no_main_guard_and_its_functions_train_together(tmp_path: Path) -> None:
    ended = run_script(
        tmp_path,
        """
        import photinus, torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def forward(self, x):
                return self.layer(x)

        def train(scale):
            with photinus.init(backend="photinus") as world:
                model = photinus.DistributedDataParallel(Net())
                model(torch.full((1, 2), scale * (world.rank + 1))).sum().backward()
                print("rank", world.rank, "done")
                return model.module.layer.weight.grad

        gradients = photinus.launch(train, nprocs=2, args=(2.0,))
        assert torch.equal(gradients[0], gradients[1]), gradients
        print(gradients[0].tolist())
        """,
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 done\n" in ended.stdout
    assert "[1] rank 1 done\n" in ended.stdout
    assert ended.stdout.endswith("[[3.0, 3.0]]\n")


CELL = """
import multiprocessing, pickle
from dataclasses import dataclass

@dataclass
class Config:
    lr: float

def halve(config):
    return Config(config.lr / 2)

def by_spawn(config):
    pickle.dumps(halve)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(halve, [pickle.loads(pickle.dumps(config))])

def of_an_argument(config):
    return pickle.loads(pickle.dumps(config))
"""


@pytest.mark.parametrize("name", ["by_spawn", "of_an_argument"])
def test_classes_and_functions_of_a_notebooks_cell_are_pickled_by_name_in_the_ranks(name: str) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<ipython-input-1>", "exec"), cell)
    (got,) = photinus.launch(cell[name], nprocs=1, args=(cell["Config"](1.0),))
    assert got == ([cell["Config"](0.5)] if name == "by_spawn" else cell["Config"](1.0))


def test_output_reaches_a_notebooks_stand_in_for_stdout(tmp_path: Path) -> None:
    ended = run_script(
        tmp_path,
        """
        import io, sys, photinus

        pieces = []

        class Cell(io.StringIO):
            def fileno(self):
                raise io.UnsupportedOperation

            def write(self, text):
                pieces.append(text)
                return super().write(text)

        def speak():
            import os, sys, time
            print("here is rank", os.environ["RANK"])
            time.sleep(0.3 * (os.environ["RANK"] == "0"))
            for state in (50, 100) if os.environ["RANK"] == "0" else ():
                print(f"\\r{state}%", end="", file=sys.stderr, flush=True)
                time.sleep(0.3)

        terminal, sys.stdout = sys.stdout, Cell()
        photinus.launch(speak, nprocs=2)
        terminal.write("in the cell: " + sys.stdout.getvalue())
        assert not any("\\r50%" in piece and "\\r100%" in piece for piece in pieces), "a bar comes state by state"
        """,
    )
    assert ended.returncode == 0, ended.stderr
    assert "in the cell: " in ended.stdout
    assert "here is rank 0" in ended.stdout
    assert "[1] here is rank 1" in ended.stdout


def test_what_ranks_print_when_they_are_interrupted_reaches_a_notebook(tmp_path: Path) -> None:
    ended = run_script(
        tmp_path,
        f"""
        import io, os, signal, sys, threading, time, photinus
        folder = {str(tmp_path)!r}

        class Cell(io.StringIO):
            def fileno(self):
                raise io.UnsupportedOperation

        def work():
            try:
                open(os.path.join(folder, "ready"), "w").close()
                time.sleep(100)
            except KeyboardInterrupt:
                print("rank 0 saves")
                raise

        def interrupt():
            while not os.path.exists(os.path.join(folder, "ready")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        terminal, sys.stdout = sys.stdout, Cell()
        try:
            photinus.launch(work, nprocs=1)
        except KeyboardInterrupt:
            terminal.write(sys.stdout.getvalue())
        """,
    )
    assert (ended.returncode, ended.stdout) == (
        0,
        "rank 0 saves\nphotinus: ended by SIGINT: its worker was ended\n",
    ), ended.stderr


def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("the key that rank 1 needs")
    time.sleep(60)


def test_a_rank_that_fails_is_quoted_in_the_error() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 failed with KeyError: 'the key that rank 1 needs'") as caught:
        photinus.launch(fails_on_rank_1, nprocs=2)
    assert caught.value.exit_code == 1


def is_missed_before_it_can_say_why() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(0.2)
        raise KeyError("the key that rank 1 needs")
    raise PeerLostError("rank 1 raised KeyError")


def test_the_error_quotes_the_cause_and_not_a_rank_that_missed_it_sooner() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 failed with KeyError: 'the key that rank 1 needs'"):
        photinus.launch(is_missed_before_it_can_say_why, nprocs=2)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_gives_the_launchers_exit_code() -> None:
    with pytest.raises(LaunchError, match="exit code 137; the output of the ranks is above"):
        photinus.launch(is_killed, nprocs=1)


def ends_its_process() -> int:
    if os.environ["RANK"] == "1":
        os._exit(0)
    return 5


def test_a_rank_whose_function_does_not_return_is_an_error_also_with_exit_code_0() -> None:
    with pytest.raises(LaunchError, match="rank 1 exited with code 0 before ends_its_process returned"):
        photinus.launch(ends_its_process, nprocs=2)


def attempt() -> int:
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if number == 0:
        os._exit(3)
    return number


def test_ranks_are_started_anew_as_often_as_asked() -> None:
    assert photinus.launch(attempt, nprocs=2, max_restarts=1) == [1, 1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no option -P")
def test_a_file_of_the_working_directory_takes_no_modules_place(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("random.py", "platform.py"):
        (here / name).write_text("raise SystemExit('this is not the module of Python')")
    script = tmp_path / "script.py"
    script.write_text("import photinus\nprint(photinus.launch(lambda: 5, nprocs=1))\n")
    ended = subprocess.run([sys.executable, str(script)], cwd=here, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[5]\n"), ended.stderr


def test_what_cannot_travel_is_refused_before_any_process_is_started() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot send .* to other processes: cannot pickle '_thread\.lock' object"):
        photinus.launch(lambda: lock.acquire(), nprocs=2)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"nprocs": 0}, ValueError, "nprocs=0: needs a whole number above 0"),
        ({"nprocs": "all"}, ValueError, "nprocs='all'"),
        ({"nprocs": True}, ValueError, "nprocs=True"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1"),
        ({"main": place(2) if "RANK" in os.environ else 5}, TypeError, "launch needs a function, got int"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object], error: type[Exception], told: str) -> None:
    arguments = {"main": place, "nprocs": 2, **wrong}
    with pytest.raises(error, match=told):
        photinus.launch(**arguments)  # type: ignore[arg-type]


def test_launching_inside_a_rank_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="this process is already rank 1 of 4 of a job"):
        photinus.launch(place, nprocs=2)


def test_a_launch_in_each_of_several_tasks_of_srun_is_refused(monkeypatch):
    monkeypatch.delenv("PHOTINUS_WORLD_SIZE", raising=False)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"Slurm started 4 processes .* would start 2 more in each"):
        photinus.launch(print, nprocs=2)


WAITING = """
import os, sys, time, photinus

def wait(folder):
    open(os.path.join(folder, "pid." + os.environ["RANK"]), "w").write(str(os.getpid()))
    time.sleep(120)

photinus.launch(wait, nprocs=2, args=(sys.argv[1],))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_neither_a_rank_nor_a_file_outlives_the_process_that_launched(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 60
    files = [tmp_path / "pid.0", tmp_path / "pid.1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    ranks = [int(file.read_text()) for file in files]
    process.send_signal(number)  # to this process alone, as a notebook's interrupt
    process.wait(timeout=30)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) or any(temporary.iterdir()):
        assert time.monotonic() < deadline + 30, f"ranks {ranks} or {list(temporary.iterdir())} are still there"
        time.sleep(0.05)
