"""tools/gpu.py spends a loan of a GPU: a fault in one stage shows in its summary, and in nothing else."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fork_server import REPOSITORY


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", REPOSITORY / "tools" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_script"] = module
    spec.loader.exec_module(module)
    return module


GPU = script()

TESTS = """
import os, signal, time
import pytest

pytestmark = pytest.mark.usefixtures("quick")

@pytest.fixture
def quick(): yield

def test_well(record_property):
    record_property("figure", 42)

def test_raises():
    if FAULT == "exception":
        raise RuntimeError("planted words")

def test_ends():
    if FAULT == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "rank":
        from tests.rank_pool import RankPool
        with RankPool("tests.unit.test_gpu_script:Crashing", world_size=2) as pool:
            pool.ask({})
    while FAULT == "timeout":
        time.sleep(0.1)

def test_after():
    pass
"""


class Crashing:
    """A rank of which the second ends in its first command."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self.rank = rank

    def __call__(self, command: object) -> int:
        if self.rank == 1:
            os._exit(7)
        return self.rank


def stages(folder: Path, fault: str) -> list[object]:
    """Three stages of tests like those of tests/gpu; the second has the fault."""
    conftest = (REPOSITORY / "tests" / "gpu" / "conftest.py").read_text(encoding="utf-8")
    made = []
    for number, planted in enumerate(("", fault, "")):
        tests = folder / f"tree{number}" / "tests" / "gpu"
        tests.mkdir(parents=True)
        (tests / "conftest.py").write_text(conftest)
        (tests / "test_planted.py").write_text(TESTS.replace("FAULT", repr(planted)))
        words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests.parents[1]), "-c", os.devnull)
        made.append(GPU.Stage(f"stage{number}", 4.0, (sys.executable, *words, str(tests / "test_planted.py"))))
    return made


PLANTED = """
import runpy, sys

raised = []

def once():
    if not raised:
        raised.append(True)
        return True

def pytest_runtest_call(item):
    if once():
        raise RuntimeError("planted words")

if __name__ == "__main__":
    from tests.rank_pool import RankError, RankPool

    ask = RankPool.ask

    def ask_or_fail(pool, command):
        if once():
            raise RankError("planted words")
        return ask(pool, command)

    RankPool.ask = ask_or_fail
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
AFTERWARDS = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True); sys.exit('planted words')"


def with_a_fault(stage: Any, planted: Path) -> Any:
    """A real stage in which one check, one measurement or the command itself goes wrong."""
    python, *words = stage.command
    if words[:2] == ["-m", "pytest"]:
        words[2:2] = ["-p", planted.stem]
    elif words[0].startswith("benchmarks/"):
        words.insert(0, str(planted))
    else:
        words = ["-c", AFTERWARDS, python, *words]
    return GPU.Stage(stage.name, stage.limit_s, (python, *words))


def rows(summary: str) -> dict[tuple[str, str], tuple[str, str]]:
    found = re.findall(r"^\| (\S+) \| ([^|]+?) \| (\w+) \| [\d.]* \| (.*) \|$", summary, re.MULTILINE)
    return {(stage, check): (outcome, words) for stage, check, outcome, words in found}


@pytest.mark.parametrize(
    ("fault", "misses", "told"),
    [
        ("exception", {"test_raises"}, "planted words"),
        pytest.param("rank", {"test_ends"}, "rank 1 ended", marks=pytest.mark.slow),
        pytest.param("crash", {"test_ends", "test_after", "(the stage)"}, "SIGKILL", marks=pytest.mark.slow),
    ],
)
@pytest.mark.seconds
def test_a_fault_shows_in_the_summary_and_in_nothing_else(
    tmp_path: Path, fault: str, misses: set[str], told: str
) -> None:
    out = tmp_path / "out"
    results = GPU.Results(out)
    planned = stages(tmp_path, fault)
    began = time.monotonic()
    # Python starts slowly on a busy machine: 4 s are for that, and --fake gives eight times as many.
    assert not GPU.run(planned, results, fake=True)
    assert time.monotonic() - began < 3 * 8 * 4 + 10
    found = rows((out / "summary.md").read_text(encoding="utf-8"))
    assert {
        check for (stage, check), (outcome, _) in found.items() if stage == "stage1" and outcome == "miss"
    } == misses
    assert any(told in words for (stage, _), (outcome, words) in found.items() if outcome == "miss"), found
    for other in ("stage0", "stage2"):
        outcomes = {check: outcome for (each, check), (outcome, _) in found.items() if each == other}
        assert outcomes == dict.fromkeys(("test_well", "test_raises", "test_ends", "test_after", "(the stage)"), "pass")
    assert found["stage1", "test_well"] == ("pass", "figure 42")
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl", "summary.md"]
    assert not list(tmp_path.glob(".out-*"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_fault_in_each_of_the_real_stages_shows_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, out = tmp_path / "planted.py", tmp_path / "out"
    planted.write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    planned = [with_a_fault(stage, planted) for stage in GPU.stages(fake=True)]
    assert not GPU.run(planned, GPU.Results(out), fake=True)
    found = rows((out / "summary.md").read_text(encoding="utf-8"))
    misses = {
        stage.name: [c for (s, c), (o, _) in found.items() if s == stage.name and o == "miss"] for stage in planned
    }
    assert {name: len(checks) for name, checks in misses.items()} == dict.fromkeys(misses, 1)
    for name, (check,) in misses.items():
        assert "planted words" in found[name, check][1]
        is_whole = name in ("machine", "build", "engine", "overlap")  # the last measures all before it tells
        assert (check == "(the stage)") == is_whole, (name, check)
    assert {outcome for outcome, _ in found.values()} == {"pass", "miss", "skip"}


@pytest.mark.slow
def test_what_a_stage_did_not_do_in_its_time_is_unfinished_and_no_miss(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not GPU.run(stages(tmp_path, "timeout"), GPU.Results(out), fake=True)
    summary = (out / "summary.md").read_text(encoding="utf-8")
    found = rows(summary)
    assert "12 pass, 0 miss, 3 unfinished, 0 skip." in summary
    outcomes = {check: outcome for (stage, check), (outcome, _) in found.items() if stage == "stage1"}
    late = dict.fromkeys(("test_ends", "test_after", "(the stage)"), "unfinished")
    assert outcomes == {"test_well": "pass", "test_raises": "pass", **late}
    assert found["stage1", "test_ends"][1].startswith("did not end: the stage not done within")
    assert found["stage1", "test_after"][1].startswith("did not begin: the stage not done within")


@pytest.mark.seconds
def test_what_a_stage_leaves_of_its_time_lengthens_the_next_and_never_the_whole(tmp_path: Path) -> None:
    hangs, ends = (sys.executable, "-c", "import time; time.sleep(60)"), (sys.executable, "-c", "")
    began = time.monotonic()
    planned = [GPU.Stage("short", 10.0, ends), GPU.Stage("long", 2.5, hangs), GPU.Stage("next", 2.5, hangs)]
    assert not GPU.run(planned, GPU.Results(tmp_path / "out"), fake=False)
    assert time.monotonic() - began < 45  # two stages that hang for a minute each were cut off
    found = rows((tmp_path / "out" / "summary.md").read_text(encoding="utf-8"))
    assert found["short", "(the stage)"][0] == "pass"
    assert found["long", "(the stage)"] == ("unfinished", "not done within 5 s:")  # twice its limit at most
    assert found["next", "(the stage)"][0] == "unfinished"


def test_no_stage_begins_when_the_time_is_over_and_what_could_not_start_is_told(tmp_path: Path) -> None:
    results = GPU.Results(tmp_path / "out")
    planned = [GPU.Stage("absent", 5.0, (str(tmp_path / "nothing"),)), GPU.Stage("late", 5.0, (sys.executable, "-V"))]
    assert not GPU.run(planned[:1], results, fake=False)
    assert GPU.run(planned[1:], results, fake=False, total_s=1.0) is False, "the miss before still counts"
    found = rows((tmp_path / "out" / "summary.md").read_text(encoding="utf-8"))
    assert found["absent", "(the stage)"][0] == "miss"
    assert "could not be started" in found["absent", "(the stage)"][1]
    assert found["late", "(the stage)"] == ("skip", "no time was left for it")


def test_what_a_stage_started_does_not_outlive_it(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    child = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '600']); open({str(pids)!r}, 'w').write(str(p.pid))"
    )
    GPU.run([GPU.Stage("parent", 10.0, (sys.executable, "-c", child))], GPU.Results(tmp_path / "out"), fake=True)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(int(pids.read_text())):
        time.sleep(0.05)
    assert not _runs(int(pids.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_limits_of_all_stages_fit_into_a_short_loan() -> None:
    planned = GPU.stages(fake=False)
    assert [stage.name for stage in planned][:3] == ["machine", "build", "engine"]
    assert GPU.TOTAL_S < 9 * 60
    assert sum(stage.limit_s for stage in planned) <= GPU.TOTAL_S
    # Correct at all, then how fast: the rest is worth less if the loan ends early.
    assert [stage.name for stage in planned][3:5] == ["photinus", "collectives"]


def test_a_git_repository_is_not_needed() -> None:
    words = (REPOSITORY / "tools" / "gpu.py").read_text() + (REPOSITORY / "CMakeLists.txt").read_text()
    assert not re.search(r"\bgit (rev|describe|log)", words)
    shown = subprocess.run(
        ["make", "-n", "gpu", "FAKE=1", "PYTHON=python3"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if "MAKE" not in name},  # it may be make that runs this
        capture_output=True,
        text=True,
    )
    assert shown.stdout.strip() == "python3 tools/gpu.py --fake"
