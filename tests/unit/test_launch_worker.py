"""The bootstrap in each worker: the script finds what Python would give it, and its end is recorded."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

import photinus.run.local.worker as worker
from photinus.job.deaths import Raised
from photinus.job.worker_files import WorkerFiles
from photinus.run.local import processes

WORKER = worker.__file__

REPORT = """
'''the doc'''
import json, sys
main = sys.modules["__main__"]
names = ("__name__", "__doc__", "__package__", "__file__", "__cached__")
found = {name: getattr(main, name) for name in names}
found["spec"] = main.__spec__ and main.__spec__.name
found["loader"] = type(main.__loader__).__name__
found["argv"], found["path"] = sys.argv, sys.path
found["main_is_me"] = main.__dict__ is globals()
class Thing: pass
import pickle
found["pickles"] = isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/inner.py", "package/__main__.py"):
        (tmp_path / name).write_text(REPORT if name != "package/__init__.py" else "")
    (tmp_path / "link.py").symlink_to("package/inner.py")
    # Names of the standard library in the working directory: `python script.py` does not see the folder's neighbours.
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def bootstrap(
    kind: str, target: str, *arguments: str, cwd: Path, error_file: Path | str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, WORKER, str(os.getpid()), "", kind, target, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env=environ(error_file) | variables,
    )


def environ(error_file: Path | str = "", fault_file: Path | str = os.devnull) -> dict[str, str]:
    return os.environ | WorkerFiles(str(error_file), str(fault_file)).environ()


def python(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env={**os.environ, **environ})


@pytest.mark.parametrize("target", ["script.py", "./package/../script.py", "link.py", "package"])
@pytest.mark.parametrize("where", [".", "elsewhere"])
def test_a_script_finds_what_python_gives_it(folder, target, where):
    target = target if where == "." else f"../{target}"
    expected = python(target, "a", "-b", cwd=folder / where)
    found = bootstrap("script", target, "a", "-b", cwd=folder / where)
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert found.stderr == expected.stderr == ""


@pytest.mark.parametrize("target", ["package.inner", "package", "script"])
def test_a_module_finds_what_python_gives_it(folder, target):
    expected = python("-m", target, "a", "-b", cwd=folder)
    found = bootstrap("module", target, "a", "-b", cwd=folder)
    assert json.loads(found.stdout) == json.loads(expected.stdout)


def test_files_of_the_working_directory_do_not_hide_the_standard_library(folder):
    for name in ("json.py", "types.py", "ctypes.py", "importlib.py", "photinus.py"):
        (folder / "elsewhere" / name).write_text("raise SystemExit('hidden')")
    assert bootstrap("script", "../script.py", cwd=folder / "elsewhere").returncode == 0


def test_python_safe_path_is_honoured(folder):
    expected = python("script.py", cwd=folder, PYTHONSAFEPATH="1")
    found = bootstrap("script", "script.py", cwd=folder, PYTHONSAFEPATH="1")
    assert json.loads(found.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    ("text", "code", "err"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(256 + 3)", 3, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_exit_codes_are_pythons_and_an_interrupt_is_quiet(folder, text, code, err):
    (folder / "script.py").write_text(text)
    ended = bootstrap("script", "script.py", cwd=folder)
    assert (ended.returncode, ended.stderr) == (code, err)


FAILING = """
import atexit, threading, time
def inner():
    raise ValueError("bad\\nbatch")
atexit.register(print, "atexit ran")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ran"))).start()
try:
    {}["x"]
except KeyError as missing:
    inner()
"""


def test_an_exception_is_recorded_without_our_frames_and_not_printed_twice(folder):
    (folder / "script.py").write_text(FAILING)
    error_file = folder / "error.json"
    ended = bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    assert ended.returncode == 1
    assert ended.stderr == ""
    assert ended.stdout == "thread ran\natexit ran\n"  # the interpreter leaves in its usual order
    record = json.loads(error_file.read_text())
    assert record["message"]["message"] == "ValueError: bad\nbatch"  # torch elastic's own reader finds its fields
    assert int(record["message"]["extraInfo"]["timestamp"]) > 0
    raised = Raised.from_json(error_file.read_text())
    assert raised.chain == (("ValueError", "bad\nbatch"), ("KeyError", "'x'"))
    assert (raised.exit_code, raised.raised_at_s > 0) == (1, True)
    assert raised.traceback == python("script.py", cwd=folder).stderr
    assert error_file.read_text().endswith("}\n")


def test_a_child_that_the_script_forked_fails_for_itself(folder):
    (folder / "script.py").write_text(
        "import os\nif os.fork() == 0:\n    raise ValueError('child')\nprint(os.wait()[1] >> 8)\n"
    )
    error_file = folder / "error.json"
    ended = bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert "ValueError: child" in ended.stderr
    assert not error_file.exists()


@pytest.mark.parametrize("target", ["made.pyc", "made.pyz"])
def test_compiled_files_and_archives_run_as_python_runs_them(folder, target):
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("import sys\nprint(__name__, sys.argv, sys.path[0])\n")
    py_compile.compile(str(folder / "app" / "__main__.py"), cfile=str(folder / "made.pyc"))
    zipapp.create_archive(folder / "app", folder / "made.pyz")
    expected = python(target, "a", cwd=folder)
    found = bootstrap("script", target, "a", cwd=folder)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == expected.stdout


WITHOUT_WORDS = "class E(Exception):\n    def __str__(self): return self.absent\nraise E\n"


@pytest.mark.parametrize("text", ["def f(:\n", "import no_such_module_at_all\n", "raise Exception\n", WITHOUT_WORDS])
def test_the_recorded_traceback_is_what_python_prints(folder, text):
    (folder / "script.py").write_text(text)
    error_file = folder / "error.json"
    bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    assert Raised.from_json(error_file.read_text()).traceback == python("script.py", cwd=folder).stderr


def test_without_an_error_file_python_prints_the_error_itself(folder):
    (folder / "script.py").write_text(FAILING)
    ended = bootstrap("script", "script.py", cwd=folder)
    assert (ended.returncode, ended.stderr) == (1, python("script.py", cwd=folder).stderr)


def test_an_excepthook_of_the_script_is_called_and_one_around_ours_prints_nothing(folder):
    (folder / "script.py").write_text(
        "import sys\n"
        "before = sys.excepthook\n"
        "def hook(kind, error, trace):\n"
        "    print('hook', kind.__name__, trace.tb_frame.f_code.co_name)\n"
        "    before(kind, error, trace)\n"
        "sys.excepthook = hook\n"
        "raise ValueError('x')\n"
    )
    error_file = folder / "error.json"
    ended = bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    assert (ended.stdout, ended.stderr) == ("hook ValueError <module>\n", "")
    assert Raised.from_json(error_file.read_text()).type_name == "ValueError"


def test_an_excepthook_that_the_script_calls_itself_prints(folder):
    (folder / "script.py").write_text(
        "import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    sys.excepthook(type(error), error, error.__traceback__)\n"
    )
    ended = bootstrap("script", "script.py", cwd=folder, error_file=folder / "error.json")
    assert ended.returncode == 0
    assert ended.stderr == python("script.py", cwd=folder).stderr
    assert "ZeroDivisionError: division by zero" in ended.stderr


@pytest.mark.parametrize("name", ["opcode.py", "traceback.py"])
def test_python_prints_an_error_that_cannot_be_recorded_because_of_a_file_beside_the_script(folder, name):
    (folder / name).write_text("")
    (folder / "script.py").write_text("def inner():\n    raise ValueError('mine')\ninner()\n")
    ended = bootstrap("script", "script.py", cwd=folder, error_file=folder / "error.json")
    assert ended.returncode == 1
    assert ended.stderr == python("script.py", cwd=folder).stderr


def test_of_an_endless_error_beginning_and_end_are_recorded(folder):
    (folder / "script.py").write_text("raise ValueError('begin' + '\U0001f600' * 2_000_000 + 'end')\n")
    error_file = folder / "error.json"
    bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    assert error_file.stat().st_size < processes._RECORD_LIMIT_BYTES
    raised = Raised.from_json(error_file.read_text())
    assert raised.text.startswith("begin")
    assert raised.traceback.startswith("Traceback (most recent call last)")
    assert raised.traceback.endswith("end\n")


def test_leaving_with_a_code_is_recorded_with_what_lies_behind(folder):
    (folder / "script.py").write_text(
        "import sys\ntry:\n    raise ConnectionError('peer lost')\nexcept ConnectionError:\n    sys.exit(7)\n"
    )
    error_file = folder / "error.json"
    bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    raised = Raised.from_json(error_file.read_text())
    assert raised.chain == (("SystemExit", "7"), ("ConnectionError", "peer lost"))
    assert (raised.exit_code, raised.traceback) == (7, "")


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("urllib.request.urlopen('http://127.0.0.1:9')", ("other", "other")),  # connection refused
        ("raise RuntimeError('timed out waiting for a licence')", ("other",)),
        ("torch.fail()", ("torch",)),
        ("torch._utils.reraise()", ("other",)),  # what a data loader's worker met
        ("for key in (numbers := {1: 1}): numbers[key + 1] = 1", ("torch",)),  # by C, as torch's work.wait() does
    ],
)
def test_who_raised_an_error_is_recorded(folder, line, by):
    (folder / "torch").mkdir()
    raises = "():\n    raise RuntimeError('broken pipe')\n"
    (folder / "torch" / "__init__.py").write_text(f"from . import _utils\ndef fail{raises}")
    (folder / "torch" / "_utils.py").write_text(f"def reraise{raises}")
    (folder / "script.py").write_text(f"import torch, urllib.request\n{line}\n")
    error_file = folder / "error.json"
    bootstrap("script", "script.py", cwd=folder, error_file=error_file)
    raised = Raised.from_json(error_file.read_text())
    assert raised.by[: len(by)] == by
    assert raised.lost_a_peer == (by == ("torch",) and "broken pipe" in raised.text)


def test_a_module_that_is_missing_deeper_down_is_an_import_error(folder):
    error_file = folder / "error.json"
    ended = bootstrap("module", "package.nothing", cwd=folder, error_file=error_file)
    assert ended.returncode == 1
    assert Raised.from_json(error_file.read_text()).text == "no module named package.nothing"


def test_a_fatal_signal_leaves_the_stack_in_the_fault_file(folder):
    (folder / "script.py").write_text("import os\ndef inner():\n    os.abort()\ninner()\n")
    faults = folder / "faults"
    faults.touch()
    command = [sys.executable, WORKER, str(os.getpid()), "", "script", "script.py"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=folder, env=environ(fault_file=faults)
    )
    assert (ended.returncode, ended.stderr) == (-6, "")
    assert 'script.py", line 3 in inner' in faults.read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_of_several_words_is_written_in_one_piece(folder, unbuffered):
    (folder / "script.py").write_text(
        "import os, sys\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('one', 2, 'three', file=stream)\n"
        "    assert os.read(int(sys.argv[1]), 100) == b'one 2 three\\n'\n"  # what came with the first write
        "    print('kept', end='', file=stream, flush=True)\n"
        "    assert os.read(int(sys.argv[1]), 100) == b'kept'\n"
    )
    reading, writing = os.pipe()
    command = [sys.executable, WORKER, str(os.getpid()), "", "script", "script.py", str(reading)]
    ended = subprocess.run(
        command,
        stdout=writing,
        stderr=writing,
        pass_fds=[reading],
        cwd=folder,
        env=environ() | {"PYTHONUNBUFFERED": unbuffered},
        timeout=60,
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as rest:
        assert (ended.returncode, rest.read()) == (0, b"")


def test_lines_reach_a_pipe_before_a_kill(folder):
    (folder / "script.py").write_text("import os\nprint('last words')\nos.kill(os.getpid(), 9)\n")
    ended = bootstrap("script", "script.py", cwd=folder)
    assert (ended.returncode, ended.stdout) == (-9, "last words\n")


def test_a_worker_whose_launcher_is_gone_already_does_not_run_the_script(folder):
    command = [sys.executable, WORKER, "1", "", "script", "script.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    assert (ended.returncode, ended.stdout) == (137, "")
