"""Forked processes of the tests behave as fresh interpreters: environment, streams, exit codes, exit handlers."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.fork_server import ForkedProcess, fork_python


def act(what: str) -> None:
    atexit.register(print, "exit handler")
    print(os.environ["ONLY_HERE"], "torch" in sys.modules, len(os.listdir("/proc/self/task")), flush=True)
    if what == "raise":
        raise ValueError("so many words")
    if what == "wait":
        signal.pause()
    sys.exit(int(what))


def start(what: str) -> tuple[ForkedProcess, tempfile._TemporaryFileWrapper[str]]:
    out = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - closed by whoever reads it
    environ = {**os.environ, "ONLY_HERE": what}
    return fork_python("tests.unit.test_fork_server:act", [what], environ=environ, stdout=out, stderr=out), out


@pytest.mark.parametrize(("what", "code"), [("0", 0), ("7", 7), ("raise", 1)])
def test_it_ends_as_an_interpreter_does(what: str, code: int) -> None:
    process, out = start(what)
    assert process.wait(timeout=30) == code
    with out:
        out.seek(0)
        text = out.read()
    assert text.startswith(f"{what} True 1\n")
    assert "exit handler\n" in text
    assert ("ValueError: so many words" in text) == (what == "raise")


def test_it_is_ended_by_pid_while_others_run_on() -> None:
    (first, first_out), (second, second_out) = start("wait"), start("wait")
    with first_out, second_out:
        first.kill()
        assert first.wait(timeout=30) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=0.2)
        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=30) == -signal.SIGTERM
