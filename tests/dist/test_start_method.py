"""Workers forked from one process that has imported torch behave as those that import it themselves."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipapp
from pathlib import Path

import pytest

from tests.dist.test_run import RunningJob, run_job, script

WAYS = ("fork", "spawn")


def lines(folder: Path, way: str, text: str, *words: str, **environ: str) -> list[str]:
    """Return the lines that two workers print, without the marks of ranks, each once."""
    ended = run_job("--nproc-per-node", "2", "--cpu", "--start-method", way, *words, script(folder, text), **environ)
    assert ended.code == 0, ended.err
    return sorted({line.partition("] ")[2] if line[:1] == "[" else line for line in ended.out.splitlines()})


def why_spawned(folder: Path, text: str, *words: str | Path, python: tuple[str, ...] = (), **environ: str) -> str:
    command = [sys.executable, *python, "-m", "photinus", "run", "--nproc-per-node", "2", "--cpu", "--dry-run"]
    ended = subprocess.run(
        [*command, *words, script(folder, text)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    found = re.search("(?m)^start method: (?:spawn: (.*)|fork, )", ended.stdout)
    assert found is not None, ended.stdout
    return found[1] or ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> dict[str, int]:
    """The pids of its children, by name."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if parent_of(int(file.parent.name)) == pid:
                found[file.read_text().strip()] = int(file.parent.name)
    return found


SHOW = """
import os, signal, sys, warnings
def name(handler): return getattr(handler, "__name__", str(handler))
print("signals", [name(signal.getsignal(n)) for n in (2, 13, 15, 1, 10)], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print("path", sys.path, sys.flags, sys.argv)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
    print(stream.seekable(), stream.buffer.seekable(), stream.isatty(), type(stream.buffer), stream.fileno())
command = [word.strip() for word in open("/proc/self/cmdline").read().split("\\0")]
print("command", command[-3:])
print("original", len(sys.orig_argv), sys.orig_argv[0], open("/proc/self/comm").read())
print("session", os.getsid(0) == os.getpid() == os.getpgid(0), os.getppid() == int(sys.orig_argv[-4]))
names = set(os.environ) - {"TORCHELASTIC_ERROR_FILE"}
print("in C", sorted(os.popen("env | cut -d= -f1").read().split()))
print("environ", sorted(names), os.getcwd())
import torch
print("torch", torch.__name__, torch.__spec__.origin, torch.get_num_threads())
import torch.nn, numpy
print(numpy.__spec__.name, torch.nn.__spec__.parent, torch.cuda.is_initialized())
"""


def test_a_worker_sees_the_same_by_both_ways(tmp_path: Path) -> None:
    forked, spawned = (lines(tmp_path, way, SHOW, PHOTINUS_LAUNCH="") for way in WAYS)
    assert forked == spawned


def test_a_forked_worker_has_torch_from_its_start_and_proc_shows_the_environment_of_its_server(tmp_path: Path) -> None:
    text = "import sys\nprint('torch' in sys.modules, 'RANK=1' in open('/proc/self/environ').read().split(chr(0)))\n"
    text += "import torch"
    assert lines(tmp_path, "fork", text, "--local-ranks-filter", "1") == ["True False"]
    assert lines(tmp_path, "spawn", text, "--local-ranks-filter", "1") == ["False True"]


def test_a_forked_worker_has_the_modules_of_trainer_and_backend_from_its_start(tmp_path: Path) -> None:
    text = "import sys\nbefore = {*sys.modules}\nimport photinus\nphotinus.init()\n"
    text += "print(*sorted(name for name in {*sys.modules} - before if name.startswith('photinus')))"
    assert lines(tmp_path, "fork", text, "--local-ranks-filter", "1") == [""]


def test_a_forked_worker_has_the_folder_for_temporary_files_that_the_script_sets(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = f"import os, tempfile\nos.environ['TMPDIR'] = {str(tmp_path / 'mine')!r}\nprint(tempfile.gettempdir())\n"
    text += "import torch\nprint(torch.optim)"
    for way in WAYS:
        assert str(tmp_path / "mine") in lines(tmp_path, way, text)


def test_a_launcher_that_has_more_than_a_thousand_files_open_forks_workers(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("needs 2048 open files")
    program = script(tmp_path, "import sys\nprint('torch' in sys.modules)\nimport torch")
    hold = 'ulimit -n 2048; for each in {1..1100}; do exec {file}</dev/null; done; exec "$@"'
    job = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "1", "--cpu", str(program)]
    ended = subprocess.run(["bash", "-c", hold, "bash", *job], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_workers_draw_different_random_numbers(tmp_path: Path) -> None:
    text = """
import random, secrets, tempfile, uuid
import numpy, torch
import multiprocessing
print("drawn", numpy.random.rand(), random.random(), uuid.uuid4(), secrets.token_hex(8), tempfile.mktemp(),
      numpy.random.default_rng().random(), torch.initial_seed(), torch.rand(1).item(),
      multiprocessing.current_process().authkey.hex())
"""
    # Some versions of numpy import it by themselves.
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: import numpy.random")
    first, second = (line.split()[1:] for line in lines(tmp_path, "fork", text, PYTHONPATH=str(tmp_path)))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_file_beside_the_script_is_imported_before_what_torch_uses(tmp_path: Path) -> None:
    (tmp_path / "typing_extensions.py").write_text("mine = 1")
    assert "typing_extensions.py takes the place of a module" in why_spawned(tmp_path, "import torch")
    (tmp_path / "typing_extensions.py").unlink()
    (tmp_path / "json.py").write_text("mine = 1")
    assert "json.py takes the place of a module" in why_spawned(tmp_path, "import torch")
    (tmp_path / "json.py").unlink()
    (tmp_path / "sympy").mkdir()  # a folder of data
    assert why_spawned(tmp_path, "import torch") == ""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "typing_extensions.py").write_text("mine = 1")
    # What the script itself puts into sys.path comes too late for what is imported already.
    text = "import sys; sys.path.insert(0, 'lib'); import typing_extensions; print(hasattr(typing_extensions, 'mine'))"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert lines(tmp_path, "fork", text) == ["False"]
        assert lines(tmp_path, "spawn", text) == ["True"]


@pytest.mark.slow
def test_an_error_is_shown_where_a_file_beside_the_script_takes_the_place_of_json(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("mine = 1")
    ended = run_job("-n", "1", "--cpu", script(tmp_path, "raise ValueError('mine')"))
    assert ended.code == 1
    assert "ValueError: mine" in ended.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch", ""),
        ("import sys, json", "the script imports only the standard library"),
        ("import os, sys\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch", "the script sets OMP_NUM_THREADS"),
        ("import os\nos.environ.update(KMP_AFFINITY='none')\nimport torch", "the script sets KMP_AFFINITY"),
        ("\ufeffimport os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch", "the script sets OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('TORCH_LOGS', '+all')\nimport torch", "the script sets TORCH_LOGS"),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nprint(os.environ['OMP_NUM_THREADS'])\nimport torch", ""),
    ],
)
def test_a_dry_run_says_why_workers_are_not_forked(tmp_path: Path, text: str, reason: str) -> None:
    found = why_spawned(tmp_path, text)
    assert found.startswith(reason) if reason else not found


def test_a_process_that_cannot_be_forked_is_not(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    found = {}
    for name, text in {
        "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "trace": "import sys; sys.settrace(lambda *_: None)",
        "no torch": "import sys; sys.modules['torch'] = None",
    }.items():
        # Only in a worker's Python: the launcher looks for torch.
        (site / "sitecustomize.py").write_text(f"import os\nif 'RANK' in os.environ:\n    {text}")
        found[name] = why_spawned(tmp_path, "import torch", PYTHONPATH=str(site))
    assert found["threads"] == "Python starts 1 thread, which no fork has"
    assert found["trace"] == "a debugger, profiler or coverage tool follows each worker"
    assert found["no torch"].startswith("`import torch` fails: ModuleNotFoundError")
    (site / "sitecustomize.py").unlink()
    assert why_spawned(tmp_path, "import torch", "--start-method", "spawn") == "--start-method spawn"
    assert "imports" in why_spawned(tmp_path, "import torch", python=("-X", "importtime"))


@pytest.mark.slow
def test_scripts_folders_archives_and_modules_find_what_python_gives_them(tmp_path: Path) -> None:
    text = "import sys, torch\nmain = sys.modules['__main__']\n"
    text += "print(__name__, __file__, __package__, type(__loader__).__name__, __spec__ and __spec__.name)\n"
    text += "print(sys.path, sys.argv)"
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("__main__.py", "__init__.py"):
        (folder / name).write_text(text if name == "__main__.py" else "")
    zipapp.create_archive(folder, tmp_path / "packed.pyz")
    script(tmp_path, text)
    for words in (["script.py"], ["package"], ["packed.pyz"], ["-m", "package"], ["-m", "script"]):
        python = subprocess.run([sys.executable, *words, "a"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        forked = run_job("-n", "1", "--cpu", "--start-method", "fork", *words, "a", cwd=tmp_path)
        assert forked.out == python.stdout != "", forked.err


CHILDREN = """
import multiprocessing, os, sys
import torch
def child(queue, word): queue.put((word, __name__, os.environ["RANK"], torch.ones(2).sum().item()))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.tensor(index)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, method))
        process.start()
        print(queue.get())
        process.join()
        print(method, process.exitcode)
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), 2, num_workers=2, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
    print(torch.nn.functional.relu(torch.nn.Linear(64, 64)(torch.zeros(256, 64))).shape)
"""


@pytest.mark.slow
def test_children_of_a_worker_by_all_methods(tmp_path: Path) -> None:
    forked, spawned = (lines(tmp_path, way, CHILDREN, "--local-ranks-filter", "0") for way in WAYS)
    assert forked == spawned
    assert len(forked) == 8


TOOLS = """
import cProfile, io, pstats, sys
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
profile = cProfile.Profile()
profile.runcall(step)
print("profile", any(name == "step" for *_, name in pstats.Stats(profile, stream=io.StringIO()).stats))
with torch.profiler.profile() as trace:
    step()
print("torch", any("addmm" in event.key for event in trace.key_averages()))
compiled = torch.compile(model, backend="eager")
print("compiled", torch.equal(compiled(torch.ones(1, 8)), model(torch.ones(1, 8))))
seen = []
sys.settrace(lambda frame, *_: seen.append(frame.f_code.co_name))
step()
sys.settrace(None)
print("traced", "step" in seen)
"""


@pytest.mark.slow
def test_profilers_compilers_and_tracers_work(tmp_path: Path) -> None:
    forked = lines(tmp_path, "fork", TOOLS)
    assert forked == ["compiled True", "profile True", "torch True", "traced True"]


@pytest.mark.parametrize("way", WAYS)
def test_ends_of_a_forked_worker_are_told_as_ever(tmp_path: Path, way: str) -> None:
    text = "import ctypes, os, sys, time, torch\ndef deep():\n    {0}\n"
    text += "if os.environ['RANK'] == '1': deep()\ntime.sleep(60)"
    words = ("-n", "2", "--cpu", "--max-restarts", "0", "--start-method", way)
    raised = run_job(*words, script(tmp_path, text.format("raise ValueError('mine')")))
    assert raised.code == 1
    assert "ValueError: mine" in raised.err
    assert not re.search("fork_server.py|worker.py|importlib", raised.err)
    crashed = run_job(*words, script(tmp_path, text.format("ctypes.string_at(0)")))
    assert crashed.code == 128 + signal.SIGSEGV
    assert 'script.py", line 3 in deep' in crashed.err
    assert not re.search("fork_server.py|worker.py", crashed.err)
    left = run_job(*words, script(tmp_path, text.format("sys.exit(7)")))
    assert left.code == 7


def test_python_options_are_a_workers_too(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import sys, torch\nprint(sys.flags.optimize, sys.warnoptions, sys.flags.dev_mode, __debug__)"
    )
    command = [
        sys.executable,
        "-O",
        "-W",
        "ignore::UserWarning",
        "-X",
        "dev",
        "-m",
        "photinus",
        "run",
        "-n",
        "1",
        "--cpu",
    ]
    ended = subprocess.run([*command, path], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "1 ['default', 'ignore::UserWarning'] True False\n", ended.stderr


def test_after_a_restart_workers_come_from_the_same_process_and_run_new_code(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("text = 'old'")
    text = """
import os, signal, sys, torch, part
print(os.environ["PHOTINUS_ATTEMPT"], part.text, flush=True)
if os.environ["PHOTINUS_ATTEMPT"] == "0":
    open("part.py", "w").write("text = 'newer'")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = run_job("-n", "1", "--cpu", script(tmp_path, text), cwd=tmp_path)
    assert ended.code == 0
    assert ended.out == "0 old\n1 newer\n"


def test_workers_of_all_attempts_import_the_same_files(tmp_path: Path) -> None:
    # The names are those of modules of Python's own that torch imports later, when it compiles.
    for name in ("cProfile", "pstats"):
        (tmp_path / f"{name}.py").write_text("mine = 1")
    text = """
import os, signal, sys, torch
import cProfile, pstats
print(cProfile.mine, pstats.mine, flush=True)
if os.environ["PHOTINUS_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = run_job("-n", "1", "--cpu", "--start-method", "fork", script(tmp_path, text), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out == "1 1\n" * 2


WAIT = """
import os, sys, time, torch
from pathlib import Path
folder = Path(sys.argv[1])
name = os.environ["RANK"] + "." + os.environ["PHOTINUS_ATTEMPT"]
(folder / ("new" + name)).write_text(str(os.getpid()))
(folder / ("new" + name)).rename(folder / name)
while not (folder / "go").exists(): time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_the_death_of_the_process_costs_no_worker_and_is_named_when_one_is_missed(
    tmp_path: Path, number: signal.Signals
) -> None:
    job = RunningJob(["-n", "2", "--cpu", script(tmp_path, WAIT), tmp_path])
    job.wait_for(tmp_path / "0.0", tmp_path / "1.0")
    os.kill(children_of(job.process.pid)["photinus-fork"], number)
    os.kill(int((tmp_path / "1.0").read_text()), signal.SIGKILL)
    job.wait_for(tmp_path / "0.1", tmp_path / "1.1")
    (tmp_path / "go").write_text("1")
    ended = job.end()
    assert ended.code == 0, ended.err
    is_killed = number == signal.SIGKILL  # one that is stopped is made to go on
    assert ended.err.count("was killed by SIGKILL: they start without it") == is_killed
    assert is_killed or "they start without it" not in ended.err
    assert "killed processes that the workers left" not in ended.err


def test_a_process_that_does_not_answer_is_not_said_to_have_been_killed(tmp_path: Path) -> None:
    kills = "import os, signal\ngeneration = 0\ndef forked():\n    global generation\n    generation += 1\n"
    kills += (
        "    if generation == 2: os.kill(os.getpid(), signal.SIGKILL)\nos.register_at_fork(after_in_child=forked)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(kills)  # each worker dies when it has just been forked
    program = script(tmp_path, "import torch\nprint('done')")
    ended = run_job("-n", "1", "--cpu", program, PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.out) == (0, "done\n")
    assert re.search(r"photinus: the process that forks workers \(pid \d+\) does not answer: they start", ended.err)


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    job = RunningJob(["-n", "2", "--cpu", script(tmp_path, WAIT), tmp_path])
    job.wait_for(tmp_path / "0.0", tmp_path / "1.0")
    pids = [children_of(job.process.pid)[name] for name in ("photinus-fork", "photinus-guard")]
    pids += [int((tmp_path / name).read_text()) for name in ("0.0", "1.0")]
    assert [parent_of(pid) for pid in pids] == [job.process.pid] * 4
    job.end(kill=True)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_torch_prints_when_it_is_imported_appears_once_for_each_worker(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\nif 'RANK' in os.environ:\n    print('at start', file=sys.stderr)\n"
        "    import importlib.abc\n    class Finder(importlib.abc.MetaPathFinder):\n"
        "        def find_spec(self, name, path=None, target=None):\n"
        "            if name == 'torch': print('at import', flush=True)\n    sys.meta_path.insert(0, Finder())"
    )
    text = "import os\nprint('before', flush=True)\nimport torch\nprint('after', flush=True)"
    ended = run_job("-n", "1", "--cpu", "--start-method", "fork", script(tmp_path, text), PYTHONPATH=str(site))
    assert ended.out.startswith("at import\nbefore\n"), ended
    assert ended.out.endswith("after\n")
    assert ended.err == "at start\n"


def test_ctrl_c_while_torch_is_imported_ends_at_once(tmp_path: Path) -> None:
    job = RunningJob(["-n", "2", "--cpu", "--start-method", "fork", script(tmp_path, "import torch")])
    deadline = time.monotonic() + 30
    while not children_of(job.process.pid).keys() >= {"photinus-guard", "photinus-fork"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    job.send(signal.SIGINT)
    ended = job.end()
    assert ended.code == 130
    assert time.monotonic() - began < 1.0
    assert ended.err == "photinus: ended by SIGINT: no worker was running\n"
