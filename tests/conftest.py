"""What holds for every test: no job outlives the test that started it, no process group, and a run leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

_END_S = 5.0  # what ends by itself has so long
# torch's cache of compiled code; what its DataLoader leaves when a sample raises, as does every killed process; the
# folder of a pytest that a test has run.
_NOT_OURS = ("torchinductor_", "pymp-", "pytest-of-")


def pytest_configure() -> None:
    """Who starts tests in the background of a script (`make test &`) has them ignore Ctrl-C, and so all they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is, as by `make test`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files of tests go to the workers whole and in order, since many have fixtures that cost seconds."""
    from xdist.scheduler import LoadScopeScheduling

    from tests.dist.ddp_checks import CHECKED_MODULES

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            # These share their ranks.
            return "ddp_checks" if file.removesuffix(".py").replace("/", ".") in CHECKED_MODULES else file

    config.option.loadscopereorder = False  # by the number of tests: the few that take a minute would come last
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """TMPDIR of all that is started here; nothing may be left in it, no process that has it, no shared memory.

    Yields what has come into it: by name, the test after which it was first seen.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it was
    seen: dict[str, str] = {}
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="photinus-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield seen
        fork_server.end_servers()
        deadline = time.monotonic() + _END_S
        while True:
            files = [name for name in os.listdir(folder) if not name.startswith(_NOT_OURS)]
            left = [f"{name} in TMPDIR, there since {seen.get(name, 'the end')}" for name in files]
            left += [f"{name} in /dev/shm" for name in _unused(set(os.listdir("/dev/shm")) - shared)]
            left += _processes_with(folder)
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    if left:
        pytest.fail("the tests have left:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def what_comes_is_noted(folder_of_the_run: dict[str, str], request: pytest.FixtureRequest) -> Iterator[None]:
    """So that what is left at the end of a run has a culprit."""
    yield
    for name in os.listdir(tempfile.gettempdir()):
        folder_of_the_run.setdefault(name, request.node.nodeid)


def _processes_with(folder: str) -> list[str]:
    """Processes that were started with this TMPDIR, or speak of it in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            if folder.encode() in (process / "environ").read_bytes() + command:
                found.append(f"process {process.name}: {command[:200].decode(errors='replace')}")
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _unused(names: set[str]) -> set[str]:
    """Return the names in /dev/shm that no process maps: other people's tests may run here too.

    Files are known by their inodes: of a semaphore, /proc shows the name that it had before it was linked to its own.
    """
    inodes = {name: Path("/dev/shm", name).stat().st_ino for name in names if Path("/dev/shm", name).exists()}
    mapped: set[int] = set()
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            mapped.update(int(line.split(maxsplit=5)[4]) for line in (process / "maps").read_text().splitlines())
        except OSError:  # it has ended, or is another user's
            continue
    return {name for name, inode in inodes.items() if inode not in mapped}


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """A test that fails half-way has not waited for the jobs that it started."""
    yield
    module = sys.modules.get("tests.dist.test_run")
    if module is not None:
        module.RunningJob.kill_all()


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    """The next test would find a session, or a group of another size than it means."""
    yield
    module = sys.modules.get("photinus.trainer.session.session")
    assert module is None or module.current_session() is None, "the test leaves a session open"
    module = sys.modules.get("torch.distributed")
    assert module is None or not module.is_initialized(), "the test leaves a process group"
