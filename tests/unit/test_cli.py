"""The `photinus` command: starts fast, knows its commands, and tells wrong use in one line."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest

import photinus
from photinus.cli.main import COMMANDS, main
from tests.made_run import write_run


def photinus_command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "photinus", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


def test_help_names_the_commands(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr()
        assert "usage: photinus COMMAND" in shown.out
        assert "run " in shown.out
        assert shown.err == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"photinus {photinus.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_a_terminal(capsys, command):
    for words in ([command, "--help"], ["help", command]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert f"usage: photinus {command}" in shown
        assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("rnu", "unknown command rnu. Did you mean run?"),
        ("xyz", "unknown command xyz. See `photinus --help`."),
        ("help rnu", "unknown command rnu. Did you mean run?"),
        ("train.py --lr 1", "To start it: photinus run train.py"),
        ("--nproc-per-node 2 x.py", "Put flags after the command"),
        ("run", "which script?"),
        ("run --nproc_node 2 x.py", "Did you mean --nproc-per-node?"),
        ("run no_such_script.py", "script no_such_script.py does not exist"),
        ("run ''", "the name of the script is empty"),
        (f"run {'x' * 300}", f"{'x' * 300}: File name too long. Use another path"),
        ("new", "the following arguments are required: DIR"),
        ("new x y", "unrecognized arguments: y"),
        ("new x --template gpt", "unknown flag --template."),
        ("doctor --jsn", "Did you mean --json?"),
        ("doctor --timeout", "--timeout needs a value: SECONDS."),
        ("doctor --timeout=-1", "--timeout -1: needs"),
        ("doctor --ssh-port 2222", "--ssh-port 2222 has an effect only with --hosts or --hostfile."),
        ("doctor --hosts a --hostfile b", "--hosts a and --hostfile b are mutually exclusive"),
        ("bench --nproc-per-node 1", "needs a whole number, 2 to 1024"),
        ("top --onec", "Did you mean --once?"),
        ("top --interval fast", "--interval fast: needs a number of seconds"),
        ("top --interval", "--interval needs a value: SECONDS"),
        ("top a b", "unrecognized arguments: b"),
        ("top no/such", "there is no such folder"),
        ("top runss", "Did you mean runs?"),
        ("top runs", "there is no run in runs"),
        ("report --otu x", "Did you mean --out?"),
        ("report -o", "-o needs a value: FILE.html"),
        ("report run out.html", "to write the page there, type -o out.html"),
        ("report run run", "is given twice"),
        ("report run -o no/such/x.html", "there is no folder no/such"),
        ("report run -o runs", "that is a folder; give a file"),
        ("report runs", "there is no run in runs"),
        ("report ~nobody-of-that-name/run", "there is no such folder"),
        ("export run", "photinus export --out ?: needs the name of a file, like model.safetensors."),
        ("export -o x.safetensors", "the following arguments are required: RUN"),
        ("export run -o x.safetensors --dtype float61", "needs float32, float16 or bfloat16. Did you mean float16?"),
        ("export run -o x.safetensors", "run has no manifest"),
        ("export no/such -o x.safetensors", "there is no such folder"),
    ],
)
def test_wrong_use_is_one_line_on_stderr_and_exit_code_2(capsys, tmp_path, monkeypatch, line, text):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("photinus: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "runs"]


def test_flags_of_run_behind_the_script_get_a_note(capfd):
    assert main(["run", "--dry-run", __file__, "--epochs", "3", "--nproc_per_node=2"]) == 0
    advice = f"write it before {__file__} if `photinus run` should have it"
    assert f"photinus: the script gets --nproc_per_node=2: {advice}\n" in capfd.readouterr().err
    for words in (["--log-dir", "logs"], ["--", "--nnodes", "2"]):  # which scripts have, too, or this one for sure
        assert main(["run", "--dry-run", __file__, *words]) == 0
        assert "the script gets" not in capfd.readouterr().err


def test_run_refuses_a_wrong_variable_before_any_worker_starts_and_tells_a_misspelt_one(capfd, monkeypatch):
    monkeypatch.setenv("PHOTINUS_TIMEOUT", "3")
    assert main(["run", "--dry-run", __file__]) == 0
    assert "variable PHOTINUS_TIMEOUT is unknown. Did you mean PHOTINUS_TIMEOUT_S?" in capfd.readouterr().err
    for wrong in ("3m", "inf", "-1"):
        monkeypatch.setenv("PHOTINUS_TIMEOUT_S", wrong)
        assert main(["run", "--dry-run", __file__]) == 2
        told = capfd.readouterr().err
        assert told.startswith(f"photinus: environment variable PHOTINUS_TIMEOUT_S='{wrong}': needs a number")
        assert told.count("\n") == 1
    monkeypatch.delenv("PHOTINUS_TIMEOUT_S")
    monkeypatch.setenv("PHOTINUS_RANKS_PER_GPU", "two")
    assert main(["run", "--dry-run", __file__]) == 2
    assert "environment variable PHOTINUS_RANKS_PER_GPU='two': needs a whole number" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["main(['run', '--help'])", "import photinus"])
def test_neither_run_nor_the_front_door_imports_what_only_pictures_and_manifests_need(what):
    code = f"import sys; from photinus.cli.main import main; {what}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "photinus.cli.main" in imported.stdout.splitlines()[-1]
    assert not {"torch", "numpy", "matplotlib", "rich", "jinja2", "yaml"} & set(
        imported.stdout.splitlines()[-1].split()
    )


def test_commands_that_train_nothing_never_import_torch(tmp_path):
    write_run(tmp_path / "run")
    lines = [f"new {tmp_path}/x", f"top --once {tmp_path}/run", f"report {tmp_path}/run -o {tmp_path}/page.html"]
    lines += [f"{command} --help" for command in COMMANDS]
    code = f"import sys; from photinus.cli.main import main; [main(line.split()) for line in {lines}]"
    code += "; print('torch' in sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert imported.stdout.endswith("False\n"), imported.stderr


def test_help_takes_under_300_ms_of_processor_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)  # not the wall's clock: the machine may be busy
    assert photinus_command("run", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-u", "-m", "photinus", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_disk_that_is_full_is_told(monkeypatch, capsys):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # which it tries once more when it is closed
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 1
    assert capsys.readouterr().err == "photinus: No space left on device: the output was truncated.\n"


def test_an_error_that_nobody_can_read_keeps_its_exit_code():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        assert (
            subprocess.run([sys.executable, "-m", "photinus", "run", "no.py"], stderr=pipe, timeout=60).returncode == 2
        )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_dry_run_takes_no_harm_from_closed_streams(closed):
    command = f'exec "$0" -m photinus run --nproc-per-node 2 --dry-run "$1" {closed}'
    ended = subprocess.run(["sh", "-c", command, sys.executable, __file__], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_name_that_the_terminals_encoding_lacks_is_written_with_backslashes(tmp_path):
    folder = tmp_path / os.fsdecode("größe".encode("latin-1"))
    ended = photinus_command("new", str(folder), PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"gr\udcf6\udcdfe: a convolutional network" in ended.stdout
    assert (folder / "README.md").read_text(encoding="utf-8").startswith(r"# gr\udcf6\udcdfe")


def test_who_ignores_the_ends_of_children_may_start_it():
    ended = subprocess.run(
        [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "2", "--dry-run", __file__],
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_who_blocks_signals_may_start_it():
    words = ["run", "--nproc-per-node", "1", "--no-python", "sh", "-c", "kill -TERM $PPID; sleep 3"]
    ended = subprocess.run(
        [sys.executable, "-m", "photinus", *words],
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,)),
    )
    assert ended.returncode == 143


def test_the_names_of_thousands_of_files_reach_the_program():
    files = [
        f"data/file-{number}" for number in range(9000)
    ]  # together more than one variable of the environment holds
    ended = photinus_command("run", "--nproc-per-node", "1", "--no-python", "sh", "-c", 'echo "$#"', "sh", *files)
    assert (ended.returncode, ended.stdout) == (0, "9000\n")


def test_a_working_directory_that_was_removed_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run", "--dry-run", __file__]) == 2
    assert f"({tmp_path}/gone) was removed. Change to another: cd to one that exists.\n" in capsys.readouterr().err
    (tmp_path / "gone").mkdir()
    assert main(["run", "--dry-run", __file__]) == 2
    told = capsys.readouterr().err
    assert f"was removed. Change to another: cd {tmp_path}/gone, which exists again.\n" in told
    assert told.count("\n") == 1


WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
"""


def test_python_without_torch_is_told_what_to_do(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = photinus_command("run", str(tmp_path / "train.py"), PYTHONPATH=path)
    assert ended.returncode == 1
    assert "photinus run needs PyTorch" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_dry_run_says_what_would_be_started_and_starts_nothing(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('it runs')")
    ended = photinus_command("run", "--dry-run", "--nproc-per-node", "3", str(tmp_path / "train.py"), "--lr", "0.1")
    assert ended.returncode == 0
    assert "3 workers on " in ended.stdout
    assert f"{tmp_path}/train.py --lr 0.1\n" in ended.stdout
    assert "  WORLD_SIZE=3\n" in ended.stdout
    assert "  LOCAL_RANK=2 RANK=2 ROLE_RANK=2\n" in ended.stdout
    assert "it runs" not in ended.stdout + ended.stderr


def test_a_device_that_is_not_there_is_told_before_anything_starts(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('it runs')")
    ended = photinus_command("run", "--device", "0,1", str(tmp_path / "train.py"), CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert "DeviceError: --device names GPU 0, but CUDA_VISIBLE_DEVICES='' shows 0 here" in ended.stderr
