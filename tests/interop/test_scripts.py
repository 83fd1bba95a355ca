"""The scripts of examples/interop: over backend photinus they end, and with the numbers that they have over gloo."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

from tests.interop.scripts import Numbers, reference, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # several runs, each with its own deadline

SCRIPTS = {
    "torch_ddp.py": None,
    "fsdp2.py": None,
    "tensor_parallel.py": None,
    "accelerate_digits.py": "accelerate",
    "lightning_fabric.py": "lightning",
    "lightning_trainer.py": "lightning",
    "hf_trainer.py": "transformers",
}
"""What each needs beside torch and scikit-learn."""

cached_reference = cache(reference)


def assert_same(ours: Numbers, theirs: Numbers) -> None:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, value), (_, expected) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("launcher", ["torchrun", "photinus run"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_librarys_script_has_the_same_losses_as_over_gloo(script: str, launcher: str) -> None:
    package = SCRIPTS[script]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{script} needs {package}: pip install -c constraints.txt '.[interop]'")
    numbers = run_script(script, backend="photinus", launcher=launcher)
    losses = [value for name, value in numbers if name in ("loss", "eval_loss")]
    assert losses[-1] < 0.9 * losses[0], "it does not learn"
    assert_same(numbers, cached_reference(script))


def test_ray_train_has_the_losses_of_photinus_run() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray_train.py needs ray: pip install -c constraints.txt '.[demo,ray]'")
    numbers = run_script("ray_train.py", "--folder", "ray", backend="photinus", launcher="ray", timeout_s=400)
    assert_same(numbers, run_script("torch_ddp.py", backend="photinus", launcher="photinus run"))


PLAIN = """
import os
import torch, torch.distributed as dist
dist.init_process_group("photinus")
{library}
rank, ours = float(os.environ["RANK"]), float(dist.get_backend() == "photinus")
line = f"result rank={{rank}} processes={{processes}} sum={{total}} ours={{ours}}\\n"
os.write(1, line.encode())  # in one piece: the ranks write to one terminal
"""
PLAIN_LIBRARIES = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator()
processes, total = accelerator.num_processes, accelerator.reduce(torch.ones(()), "sum").item()
""",
    "transformers": """
from transformers import TrainingArguments
arguments = TrainingArguments("out", report_to=[])
total = torch.ones(())
dist.all_reduce(total)
processes, total = arguments.world_size, total.item()
""",
}


@pytest.mark.parametrize("launcher", ["torchrun", "photinus run --cpu"])
@pytest.mark.parametrize("library", PLAIN_LIBRARIES)
def test_a_script_with_a_group_and_nothing_else_of_ours_trains_as_one_on_the_cpu(
    library: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install -c constraints.txt '.[interop]'")
    if launcher == "torchrun":  # as accelerate's own launcher does with --cpu
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "plain.py").write_text(PLAIN.format(library=PLAIN_LIBRARIES[library]))
    numbers = run_script(str(tmp_path / "plain.py"), backend="photinus", launcher=launcher)
    one_process = [("processes", 2.0), ("sum", 2.0), ("ours", 1.0)]
    assert sorted(numbers) == sorted([("rank", 0.0), ("rank", 1.0), *one_process, *one_process])


@pytest.mark.parametrize("how", [(), ("--in-background",)])
def test_a_sharded_checkpoint_is_the_same_at_every_world_size_and_over_gloo(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    script = "distributed_checkpoint.py"
    ours, theirs = tmp_path / "ours", tmp_path / "gloo's"
    saved = run_script(script, "save", *how, "--folder", str(ours), backend="photinus", launcher="torchrun")
    assert_same(saved, reference(script, "save", *how, "--folder", str(theirs)))
    later = []
    for folder, processes in ((ours, 1), (ours, 3), (theirs, 2)):
        arguments = ("load", "--folder", str(folder))
        loaded = run_script(script, *arguments, backend="photinus", launcher="photinus run", processes=processes)
        assert_same(loaded[:1], saved)
        assert loaded[1][1] < loaded[0][1]
        later.append(loaded[1][1])
    assert later[0] == pytest.approx(later[2], rel=1e-4)  # the optimizer's state came along too
    assert_same(reference(script, "load", "--folder", str(ours)), loaded)
