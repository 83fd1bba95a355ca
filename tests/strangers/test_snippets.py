"""Every snippet of the pages for users, taken from the pages: it runs, or it stands below with the reason why not here.

Python blocks run as they stand; fragments of a larger program get what it would have made before (GIVEN). Commands of
ours are carried out in this process, launches as `--dry-run` and in a folder that has what they name. The README's own
commands are followed to the letter in test_readme.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from photinus import env
from photinus.cli.main import main
from photinus.trainer import CheckpointFolder
from tests.fork_server import REPOSITORY
from tests.made_run import write_run
from tests.strangers.documents import PAGES, Block, blocks, commands

PYTHON = {block.name: block for page in PAGES for block in blocks(page) if block.language == "python"}
ENGINE = "docs/engine.md: import multiprocessing"

# What a fragment's program has made before, beside what every one gets: model, optimizer, loss_fn, train_set.
GIVEN = {
    "docs/how-to/export.md: from safetensors.torch import load_file": (
        "import safetensors.torch; safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
    ),
    "docs/tutorial/first-run.md: import sys": "import sys; sys.argv = ['train.py', 'runs/one']",
    'docs/how-to/backend.md: torch.distributed.init_process_group("photinus")': (
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')"
    ),
    "docs/how-to/preemption.md: for step, batch in enumerate(batches, start=1):": (
        "import os; os.environ['PHOTINUS_PREEMPT_AT_STEP'] = '3'\n"
        "batches = photinus.loader(range(20), batch_size=4)\n"
        "path, train = 'last.pt', lambda batch: None"
    ),
    'docs/how-to/deepspeed.md: auto = {"lr": 3e-5, "train_micro_batch_size_per_gpu": 8}': (
        "import json; from pathlib import Path\n"
        "keys = {'train_micro_batch_size_per_gpu': 'auto', 'optimizer': {'type': 'AdamW', 'params': {'lr': 'auto'}}}\n"
        "keys['scheduler'] = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 3}}\n"
        "Path('ds_config.json').write_text(json.dumps(keys))"
    ),
}
# How a fragment ends, where that is not at its last line; and what it leaves.
LEAVES = {"docs/how-to/preemption.md: for step, batch in enumerate(batches, start=1):": 75}
LEFT = ["runs/one/metrics.csv", "last.pt", "runs/x/tensorboard"]

ELSEWHERE = {  # Python blocks and commands that do not run here, and why
    "docs/how-to/streams.md: from datasets import load_dataset": "needs datasets: tests/dist/test_streams.py",
    "docs/how-to/evaluate.md: import torchmetrics": "needs torchmetrics: tests/interop/test_torchmetrics.py",
    "docs/how-to/ray.md: trainer = TorchTrainer(": "a part of a script: tests/interop/test_scripts.py",
    'examples/interop/README.md: torch.distributed.init_process_group("photinus")': (
        "needs the extra interop: tests/interop/test_scripts.py"
    ),
    "examples/interop/README.md: # Accelerate. evaluation_mode prevents a second wrapper; accumulate, no_sync,": (
        "needs the extra interop: tests/interop/test_our_ddp.py"
    ),
    "kill -USR1 $!": "needs the job before it: tests/faults/test_preemption.py",
    "cat hosts": "shows a file",
    "photinus top --once runs/killed": "needs the job before it: tests/strangers/test_tutorial.py",
    "kill -9 31509": "needs the job before it: tests/strangers/test_tutorial.py",
    "pip install '.[interop]'": "downloads; `make test-all` does it",
    "python3 -m venv .venv && . .venv/bin/activate": "makes an environment: tests/strangers/test_readme.py",
    "photinus doctor": "tries everything, in the README's test: tests/strangers/test_readme.py",
}
ELSEWHERE_FROM = {  # the same, by how a command begins
    "python3 -m venv ": "installs: tests/strangers/test_readme.py",
    ". .venv/": "installs: tests/strangers/test_readme.py",
    "srun ": "needs Slurm: tests/schedulers/test_slurm.py",
    "mpirun ": "needs Open MPI: tests/schedulers/test_mpirun.py",
    "sbatch ": "needs Slurm: tests/schedulers/test_slurm.py",
    "photinus doctor --model": "trains a model of the user: tests/unit/test_doctor_model.py",
    "photinus doctor --hosts": "needs hosts with ssh: tests/dist/test_hosts_over_ssh.py",
    "python -m tests.conformance": "minutes to hours: tests/conformance/test_suite.py",
    "python examples/digits/": "tests/dist/test_digits.py",
    "python examples/": "tests/dist/test_examples.py",
    "torchrun --nproc-per-node 2 examples/digits": "tests/dist/test_digits.py",
    "torchrun --nproc-per-node 2 examples/interop": "tests/interop/test_scripts.py",
    "torchrun --nproc-per-node 2 train.py": "tests/dist/test_templates.py",
    "python train.py": "tests/dist/test_templates.py",
    "pytest": "tests/dist/test_templates.py",
    "pip install ": "downloads: tests/strangers/test_readme.py",
    "cmake ": "`make native` does the same",
    "ctest ": "`make native` does the same",
    "build/native/": "`make native` does the same",
    "make setup": "made the environment of this test",
    ".venv/bin/python benchmarks/": "minutes on a quiet machine: benchmarks/results",
    "sudo .venv/bin/python benchmarks/": "minutes on a quiet machine: benchmarks/results",
}

RUNNER = """
import json, os, sys, torch, torch.distributed as dist
import photinus
from photinus.trainer.session.session import current_session
ended, environ = {}, dict(os.environ)
for name, given, text in json.load(sys.stdin):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    place = {"__name__": "__main__", "torch": torch, "photinus": photinus, "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": torch.nn.functional.cross_entropy,
        "train_set": torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))}
    try:
        exec(compile(given, "what is given", "exec"), place)
        exec(compile(text, name, "exec"), place)
        ended[name] = 0
    except SystemExit as leaving:
        ended[name] = leaving.code
    session = current_session()
    if session is not None:
        session.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    for variable in set(os.environ) - set(environ):
        del os.environ[variable]
print(json.dumps(ended))
"""


def run_python(folder: Path, *words: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},  # ranks print whole lines
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_block_of_python_runs_as_it_stands_or_in_the_program_that_it_belongs_to(tmp_path: Path) -> None:
    chosen = [block for name, block in PYTHON.items() if name not in ELSEWHERE and name != ENGINE]
    chosen.sort(key=lambda block: block.name in LEAVES)  # after a suspension the process is to end
    told = run_python(
        tmp_path, "-c", RUNNER, given=json.dumps([(each.name, GIVEN.get(each.name, ""), each.text) for each in chosen])
    )
    assert json.loads(told.splitlines()[-1]) == {each.name: LEAVES.get(each.name, 0) for each in chosen}
    assert [name for name in LEFT if not (tmp_path / name).exists()] == []


def test_the_engines_programs_print_what_they_promise(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(PYTHON[ENGINE].text)
    lines = sorted(run_python(tmp_path, "ranks.py").splitlines())
    assert [line.split()[:2] for line in lines] == [["0", "3.0"], ["1", "3.0"]]


def test_the_engines_program_in_cpp_compiles_and_adds(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("docs/engine.md") if each.language == "c++")
    (tmp_path / "ranks.cc").write_text(block.text)
    library = next(REPOSITORY.glob("build/*/native/libphotinus_engine.a"))
    command = ["c++", "-std=c++20", f"-I{REPOSITORY / 'native'}", "ranks.cc", str(library), "-pthread", "-o", "ranks"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    ended = subprocess.run(["./ranks"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(ended.stdout.splitlines()) == ["rank 0: 3", "rank 1: 3"]


def reason(command: str) -> str | None:
    """Why a command does not run here."""
    starts = (why for start, why in ELSEWHERE_FROM.items() if command.startswith(start))
    return ELSEWHERE.get(command) or next(starts, None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands name: a script, a file of hosts, examples, runs."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for name in ("digits", "a", "b", "one", "two"):
        run = write_run(tmp_path / "runs" / name)
        config = json.loads((run / "config.json").read_text())
        config["options"].update(out=f"runs/{name}", resume="auto")
        config["starts"][-1]["folder"] = str(tmp_path)
        (run / "config.json").write_text(json.dumps(config))
    weights = {"weight": torch.ones(3)}
    state = {"model": weights, "ema": {"n_averaged": torch.tensor(1), "module.weight": torch.ones(3)}}
    checkpoints = CheckpointFolder(tmp_path / "runs" / "digits" / "checkpoints", best="accuracy")
    checkpoints.save(1, {**state, "run": {"save_best": "accuracy"}}, description={}, metric=0.5)
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", env.LAUNCH.name):  # put back: a launch in this process changes them
        monkeypatch.setenv(name, "1")
    return tmp_path


def test_each_command_of_ours_is_understood(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    typed = dict.fromkeys(each for page in PAGES if page != "README.md" for each in commands(page))
    ours = [each for each in typed if reason(each) is None and (shutil.which("ssh") or "--hostfile" not in each)]
    assert len(ours) > 15
    for each in ours:
        # what the shell does with output and background is left out
        words = shlex.split(each.split(" > ")[0].split(" | ")[0].removesuffix("&"))
        assert words.pop(0) == "photinus", f"{each!r} is neither run nor listed with a reason"
        dry = words[0] == "run"
        if dry:
            words.insert(1, "--dry-run")
        assert main(words) == 0, each
        assert any(capfd.readouterr()), each
    assert (place / "compared.html").exists()


def test_no_reason_outlives_its_snippet_and_each_names_a_test_that_is_there() -> None:
    typed = [each for page in PAGES for each in commands(page)]
    assert set(ELSEWHERE) <= {*PYTHON, *typed}
    assert set(GIVEN) | set(LEAVES) | {ENGINE} <= set(PYTHON)
    assert [start for start in ELSEWHERE_FROM if not any(each.startswith(start) for each in typed)] == []
    named = [word for why in [*ELSEWHERE.values(), *ELSEWHERE_FROM.values()] for word in why.split() if "/" in word]
    assert [word for word in named if not (REPOSITORY / word).exists()] == []


def test_a_block_is_found_with_its_language_and_a_command_without_its_comment() -> None:
    assert Block("README.md", "python", "\nimport a\nb\n").name == "README.md: import a"
    assert "photinus new digits" in commands("docs/how-to/new-project.md")
    assert "pytest" in commands("src/photinus/templates/README.md")
    assert "python examples/digits/train.py" in commands("examples/digits/README.md")
