"""Two jobs on one folder: the second is refused, whoever holds it is named, and a kill leaves nothing in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.errors import PhotinusError
from photinus.trainer.record.run_folder import RunLock
from tests.fork_server import REPOSITORY
from tests.small_run import train

HOLDS = """
import multiprocessing, sys, time
from pathlib import Path
from photinus.trainer.record.run_folder import RunLock
lock = RunLock(Path(sys.argv[1]))
# As a data loader's worker:
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(
            PhotinusError, match=rf"is running: rank 0 is pid {holder.pid} on host {os.uname().nodename}"
        ):
            train(tmp_path, batch_size=12, samples=24, epochs=1)
        assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]
        holder.kill()
        holder.wait()
        assert train(tmp_path, batch_size=12, samples=24, epochs=1)["step"] == 2
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        os.kill(child, signal.SIGKILL)


def locked_for_others(folder: Path) -> bool:
    tries = (
        "import pathlib, sys\n"
        "from photinus.trainer.record.run_folder import RunLock\n"
        "RunLock(pathlib.Path(sys.argv[1]))\n"
    )
    return subprocess.run([sys.executable, "-c", tries, folder], stderr=subprocess.DEVNULL, check=False).returncode != 0


def test_in_one_process_the_later_lock_takes_over_and_the_end_of_the_earlier_does_not_open_the_folder(
    tmp_path: Path,
) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.close()
    assert locked_for_others(tmp_path)
    second.close()
    assert not locked_for_others(tmp_path)
