"""What becomes of each fenced block of the READMEs, the tutorial, the how-to pages, coming-from.md and the examples.

Python runs, in test_snippets.py. Commands run or are carried out as `--dry-run`; those that need more than this machine
stand there with a reason. Each diff has a test that runs its new side. What a page shows of a program's output is
compared with the output, here or in the test that COMPARED names. A block that is none of these is an error.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.test_run_hosts import launch, squatter
from tests.fork_server import REPOSITORY
from tests.strangers import test_chinese_readme as chinese
from tests.strangers import test_snippets as snippets
from tests.strangers.documents import PAGES, Block, blocks, commands, outputs, unwrapped
from tests.strangers.test_tutorial import alike

LISTED = [
    page for page in PAGES if page.startswith(("README", "docs/tutorial/", "docs/how-to/", "docs/coming", "examples/"))
]
HERE, TUTORIAL = "tests/strangers/test_listings.py", "tests/strangers/test_tutorial.py"
HOSTS = ["docs/how-to/ssh.md", "docs/tutorial/two-hosts.md"]
LOST = "docs/how-to/hosts.md: photinus: LaunchError: the job ended: node1 port 29500 does not answer"
PAIRS = "docs/how-to/ssh.md: From row to column: round trip in ms, bandwidth in Gbit/s"
SUSPENDED = "docs/how-to/preemption.md: kill -USR1 $!"

MEMORY = "docs/how-to/checkpoints.md: resumed from memory"
SPAWN = "docs/how-to/start-method.md: start method: spawn"

COMPARED = {  # by how an output's name begins: the test that compares it
    "README.md: ": f"{HERE}: test_the_readme_shows_lines_of_the_tutorial",
    "README.zh-CN.md: ": (
        "tests/strangers/test_chinese_readme.py: test_both_readmes_show_the_same_commands_and_the_same_first_diff"
    ),
    "docs/tutorial/first-run.md: ": f"{TUTORIAL}: test_each_command_of_the_first_page_prints_what_the_page_shows",
    "docs/tutorial/failures.md: ": (
        f"{TUTORIAL}: test_a_killed_run_ends_as_one_that_nobody_killed_and_says_what_the_page_shows"
    ),
    **{f"{page}: cat hosts": f"{HERE}: test_a_file_of_hosts_is_read_as_its_page_says" for page in HOSTS},
    LOST: f"{HERE}: test_a_port_of_another_program_is_reported_as_the_page_shows",
    PAIRS: f"{HERE}: test_pairs_of_hosts_are_printed_as_the_page_shows",
    MEMORY: f"{HERE}: test_a_resume_from_memory_is_told_as_in_the_tutorial",
    SPAWN: f"{HERE}: test_a_script_that_is_not_forked_is_told_as_its_page_shows",
    SUSPENDED: f"{HERE}: test_a_suspended_job_prints_what_the_page_shows",
    "examples/nanogpt/README.md: ": (
        "tests/dist/test_examples.py: "
        "test_nanogpt_learns_the_same_on_one_device_and_on_two_ranks_and_prints_what_its_page_shows"
    ),
}
DIFFS = {  # by page: the test that runs the new side, or the script that has it
    "README.md": (
        "tests/strangers/test_readme.py: "
        "test_the_readmes_diff_turns_one_script_into_the_other_and_the_result_prints_what_the_readme_shows"
    ),
    "docs/tutorial/larger-models.md": f"{TUTORIAL}: test_the_sharded_script_trains_to_the_same_losses",
    "examples/nanogpt/README.md": (
        "tests/dist/test_examples.py: "
        "test_nanogpt_on_many_devices_is_the_script_for_one_with_the_lines_that_its_page_shows"
    ),
}


def became_of(block: Block) -> list[str]:
    """What becomes of a block, of its commands and of what it shows of their output; "?" for what nobody runs."""
    if block.language == "python":
        runs = snippets.PYTHON.get(block.name) == block
        return [snippets.ELSEWHERE.get(block.name, "run in test_snippets.py" if runs else "?")]
    if block.language == "diff":
        return [DIFFS.get(block.page) or _of_a_diff_for_users_of_other_tools(block)]
    if block.language == "text":
        return [_compared(block.name)]
    if block.language not in ("console", ""):
        return ["?"]
    typed, shown = commands(block.page), outputs(block.page)
    text = unwrapped(block.text)
    told = [snippets.reason(each) or _run(each, block.page) for each in typed if each in text]
    told += [_compared(name) for name, lines in shown.items() if "\n".join(lines) in text]
    if block.language == "" and len(text.splitlines()) != len(told):
        told.append("?")  # a line that is no command
    return told


def _run(command: str, page: str) -> str:
    if page in ("README.md", "README.zh-CN.md"):
        return "run in test_readme.py"
    return "run with --dry-run in test_snippets.py" if command.startswith("photinus ") else "?"


def _compared(name: str) -> str:
    return next((why for start, why in COMPARED.items() if name.startswith(start)), "?")


def _of_a_diff_for_users_of_other_tools(block: Block) -> str:
    twin = next((each for each in chinese.DIFFS if each.text == block.text), None)
    if twin is None:
        return "?"
    if twin in chinese.scripts() or chinese.side(twin, "+").startswith("photinus run"):
        return "run in test_chinese_readme.py"
    # The README's own, and the one that needs Transformers.
    return DIFFS["README.md"] if twin is chinese.DIFFS[0] else "tests/interop/test_scripts.py"


def test_nobody_forgot_a_block() -> None:
    table = [(block.name, became) for page in LISTED for block in blocks(page) for became in became_of(block)]
    print(*(f"{became:<60} {name}" for name, became in table), sep="\n")  # shown where this fails
    assert [name for name, became in table if became == "?"] == []
    assert {"docs/how-to/own-loop.md", "docs/coming-from.md"} <= {
        block.page for page in LISTED for block in blocks(page)
    }


def test_a_fence_that_is_indented_or_has_a_title_does_not_hide_a_block() -> None:
    for page in LISTED:
        fences = re.findall(r"^\s*(?:```|~~~)", (REPOSITORY / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(list(blocks(page))), f"{page} has a fence that is not at the start of its line"


def test_no_reason_outlives_its_output_and_each_names_a_test_that_is_there() -> None:
    shown = [name for page in LISTED for name in outputs(page)]
    assert [start for start in COMPARED if not any(name.startswith(start) for name in shown)] == []
    for why in [*COMPARED.values(), *DIFFS.values()]:
        file, test = why.split(": ")
        assert f"def {test}(" in (REPOSITORY / file).read_text(), why


@pytest.mark.parametrize(
    "text",
    ["```python\nx = 1\n```\n", "```bash\nls\n```\n", "```text\nok\n```\n", "```console\n$ photinus top\nx\n```\n"],
)
def test_a_block_of_a_new_page_that_nobody_runs_is_found(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.md").write_text(text)
    monkeypatch.setattr("tests.strangers.documents.REPOSITORY", tmp_path)
    (block,) = blocks("new.md")
    assert "?" in became_of(block)


def test_no_page_starts_without_a_seed() -> None:
    """The ranks would make different data, which is an error."""
    assert [page for page in LISTED if "photinus.init()" in (REPOSITORY / page).read_text()] == []


def test_the_readme_shows_lines_of_the_tutorial() -> None:
    tutorial = outputs("docs/tutorial/first-run.md")
    for name, lines in outputs("README.md").items():
        command = name.removeprefix("README.md: ").replace("examples/first/", "")
        assert set(lines) <= set(tutorial[f"docs/tutorial/first-run.md: {command}"])


@pytest.mark.parametrize("page", HOSTS)
def test_a_file_of_hosts_is_read_as_its_page_says(page: str, tmp_path: Path) -> None:
    lines = outputs(page)[f"{page}: cat hosts"]
    (tmp_path / "hosts").write_text("\n".join(lines))
    (tmp_path / "train.py").touch()
    (command,) = (each for each in commands(page) if "--hostfile hosts" in each)
    words = command.replace("photinus run", "photinus run --dry-run").split()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    slots = [re.findall(r"^(\w+) slots=(\d+)", line)[0] for line in lines]
    assert re.findall(r"^  (\w+) \(over.*\n.*\n    nproc_per_node: (\d+)$", done.stdout, re.M) == slots


def test_a_resume_from_memory_is_told_as_in_the_tutorial() -> None:
    (line,) = next(lines for name, lines in outputs("docs/how-to/checkpoints.md").items() if name.startswith(MEMORY))
    assert line in [each for block in blocks("docs/tutorial/failures.md") for each in block.text.splitlines()]


def test_a_script_that_is_not_forked_is_told_as_its_page_shows(tmp_path: Path) -> None:
    (line,) = next(lines for name, lines in outputs("docs/how-to/start-method.md").items() if name.startswith(SPAWN))
    (tmp_path / "train.py").write_text('import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n')
    words = [sys.executable, "-m", "photinus", "run", "--dry-run", "--cpu", "-n", "1", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert line in done.stdout


def test_a_port_of_another_program_is_reported_as_the_page_shows(tmp_path: Path) -> None:
    ((name, shown),) = outputs("docs/how-to/hosts.md").items()
    assert name.startswith(LOST)
    (tmp_path / "train.py").touch()
    with squatter(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as port:
        said = launch(port, "--node-rank", 1, tmp_path / "train.py").end().err.replace("127.0.0.1", "node1")
    assert shown[0].replace("29500", str(port)) in said.splitlines(), said


def test_pairs_of_hosts_are_printed_as_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    from photinus.tools.doctor.hosts import Pair, print_pairs

    shown = outputs("docs/how-to/ssh.md")[PAIRS]
    names = shown[2].split()
    pairs = []
    for source, line in zip(names, shown[3:], strict=True):
        cells = re.findall(r"–|✗|[\d.]+ +[\d.]+", line.split(None, 1)[1])
        for target, cell in zip(names, cells, strict=True):
            if cell == "✗":
                pairs.append(Pair(source, target, error="timed out"))
            elif cell != "–":
                rtt_ms, gigabits = map(float, cell.split())
                pairs.append(Pair(source, target, rtt_ms / 1e3, gigabits * 1e9 / 8))
    print_pairs(names, pairs, 80)
    assert capsys.readouterr().out.rstrip().splitlines() == shown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_suspended_job_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The digits example has the page's folder, runs/digits."""
    start, kill = commands("docs/how-to/preemption.md")[:2]
    assert (start[-1], kill) == ("&", "kill -USR1 $!")
    for file in (REPOSITORY / "examples/digits").glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    log = tmp_path / "log"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        command = [sys.executable, "-m", *start[:-1].split()]
        launcher = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=file, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while "epoch  2/15" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            launcher.send_signal(signal.SIGUSR1)
            assert launcher.wait(timeout=120) == 0, log.read_text()
        finally:
            launcher.kill()
            launcher.wait()
    shown = [alike(line) for line in outputs("docs/how-to/preemption.md")[SUSPENDED]]
    assert [line for line in shown if line not in map(alike, log.read_text().splitlines())] == [], log.read_text()
