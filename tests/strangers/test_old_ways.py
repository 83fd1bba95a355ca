"""Five scripts, ported as users of five older tools would, on 1 and 2 ranks: each row that they rely on is looked at.

The scripts are in `scripts/`, the ways of starting them in `ways.py`. Rows are those of docs/coming-from.md, by their
section and place: A the hand-written DDP template, B HaiScale, C torch.distributed.launch on several machines, D
variables of the environment, E torchrun, DeepSpeed and Hugging Face, K defects of the old ways that ours has not.

| row | held by |
|---|---|
| A1 one script, one device or many, the same losses | test_the_template_trains_the_same_on_two_ranks |
| A2 spawn from inside the script | test_the_templates_spawn_is_photinus_launch |
| A3 init and destroy, no warnings at exit | test_the_template_trains_the_same_on_two_ranks |
| A4 sampler, drop_last, set_epoch | test_the_template_trains_the_same_on_two_ranks; tests/unit/test_sampler.py |
| A5 SyncBatchNorm, on CPUs too | test_the_template_trains_the_same_on_two_ranks |
| A6 plain names in checkpoints | test_the_templates_checkpoint_is_plain_torch |
| A7 rank 0 saves model, optimizer, epoch, global_step | test_the_templates_checkpoint_is_plain_torch |
| A8 --resume, at another world size too | test_the_template_resumes_on_another_number_of_ranks |
| A9 validation counts each sample once | test_the_template_trains_the_same_on_two_ranks |
| A10 config.json | test_the_templates_checkpoint_is_plain_torch; tests/unit/test_config.py |
| A11 argparse of the template | test_the_template_resumes_on_another_number_of_ranks; tests/unit/test_new_command.py |
| A12 which backends work here | tests/unit/test_doctor.py |
| B1 the same signature | test_haiscales_script_on_two_ranks |
| B2 all-reduce while backward runs | tests/dist/test_tracing.py |
| B3 sync_grad, filter_unused_parameters, stop | test_haiscales_script_on_two_ranks |
| B4 no_sync, exceptions included | test_haiscales_script_on_two_ranks |
| B5 broadcast at construction | test_haiscales_script_on_two_ranks |
| B6 _ddp_params_and_buffers_to_ignore | test_haiscales_script_on_two_ranks |
| B7 clear refusals | test_haiscales_script_on_two_ranks; tests/dist/test_ddp_construction.py |
| B8 env:// and tcp:// | test_haiscales_script_on_two_ranks |
| B9 suspension | test_the_template_trains_the_same_on_two_ranks; tests/faults/test_preemption.py |
| C1 --nproc_per_node --nnodes --node_rank --master_addr --master_port | test_the_script_of_several_machines |
| C2 --local_rank=N and the environment | test_the_script_of_several_machines |
| C3 a process and an optimizer for each device | test_the_script_of_several_machines |
| C4 any backend | test_the_script_of_several_machines |
| D1 RANK, LOCAL_RANK, WORLD_SIZE, -1 and 1 when absent | test_the_script_of_variables; tests/unit/test_world.py |
| D2 LOCAL_RANK beyond the devices | tests/unit/test_session.py |
| D3 the backend is chosen, and said | test_the_script_of_variables |
| D4 logger and bar on rank 0, warnings of all | test_the_script_of_variables |
| D5 --device, CUDA_VISIBLE_DEVICES | tests/dist/test_launch_lines.py |
| D6 the same loader call with one process | test_the_script_of_variables |
| E1 DataParallel | tests/unit/test_strategies.py |
| E2 DDP | test_one_flag_chooses_the_strategy |
| E3 ZeRO 1, 2, 3 | test_one_flag_chooses_the_strategy |
| E4 deepspeed's flags | tests/dist/test_launch_lines.py |
| E5 ds_config.json, unknown keys refused | test_one_flag_chooses_the_strategy; tests/unit/test_deepspeed_config.py |
| E6 torchrun's flags, a taken port | tests/dist/test_launch_lines.py; tests/dist/test_run_hosts.py |
| E7 Hugging Face's Trainer, Accelerate, Lightning | tests/interop/test_scripts.py |
| K1 fewer ranks, or several worlds, than were asked for | tests/dist/test_launch_lines.py; tests/unit/test_world.py |
| K2 validation that counts padding | test_the_template_trains_the_same_on_two_ranks |
| K3 resume that repeats samples or steps | test_the_template_resumes_on_another_number_of_ranks |
| K4 ranks that outlive their launcher | tests/faults/test_run_end.py |
| K5 --local_rank that today's launcher does not know | test_the_script_of_several_machines |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from photinus.runlog.tables import read_rows
from tests.fork_server import REPOSITORY
from tests.strangers.ways import WAYS, Ended, start

pytestmark = pytest.mark.timeout(400)

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def close(found: Any, wanted: Any) -> bool:
    return bool(torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run / "losses.csv")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each script has run on one rank, by plain `python script.py`."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    start("python", "template.py", ranks=1, folder=folder)
    start("python", "strategies.py", "--deepspeed", "ds_config.json", ranks=1, folder=folder)
    return folder


# ---- A: the hand-written template


def check_template(ended: Ended, folder: Path, alone: Path) -> None:
    one, many = alone / "runs/template", folder / "runs/template"
    assert len(losses(many)) == 3 * 7
    assert close(losses(many), losses(one))
    for mine, theirs in zip(read_rows(many / "metrics.csv"), read_rows(one / "metrics.csv"), strict=True):
        right = mine["accuracy"] * 51
        assert abs(right - round(right)) < 1e-6
        assert mine["accuracy"] == theirs["accuracy"]
    models = [torch.load(run / "last.pt", weights_only=True)["model"] for run in (one, many)]
    assert {"1.running_mean", "1.running_var"} <= set(models[0])
    assert all(close(models[1][name].tolist(), value.tolist()) for name, value in models[0].items())
    assert "Warning" not in ended.err, ended.err


def test_the_template_trains_the_same_on_two_ranks(alone: Path, tmp_path: Path) -> None:
    """Although the two are asked to suspend in the second epoch, and started again."""
    environ = {"PHOTINUS_PREEMPT_AT_STEP": "9"}
    ended = start("photinus run", "template.py", ranks=2, folder=tmp_path, environ=environ)
    assert "suspended at step" in ended.err
    check_template(ended, tmp_path, alone)


def test_the_templates_spawn_is_photinus_launch(alone: Path, tmp_path: Path) -> None:
    ended = start("python", "template.py", "--gpus", "2", ranks=2, folder=tmp_path)
    check_template(ended, tmp_path, alone)


def test_the_templates_checkpoint_is_plain_torch(alone: Path) -> None:
    saved = torch.load(alone / "runs/template/last.pt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (3, 21)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.SiLU(), torch.nn.Linear(16, 4)
    )
    model.load_state_dict(saved["model"])  # strictly: no prefix, nothing more, nothing less
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.load_state_dict(saved["optimizer"])
    assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.05, 6)
    config = json.loads((alone / "runs/template/config.json").read_text())
    assert config["user"]["batch_size"] == 16
    assert {"versions", "git", "hosts", "world_size", "command"} <= set(config["starts"][0])


def test_the_template_resumes_on_another_number_of_ranks(alone: Path, tmp_path: Path) -> None:
    words = ["--dataset", "clouds", "--lr", "0.05", "--batch_size", "16", "--rank", "0", "--backend", "gloo"]
    words += ["--port", "29500", "--log_path"]
    start("by hand", "template.py", *words, "first", "--epoch", "2", ranks=2, folder=tmp_path)
    start("python", "template.py", *words, "second", "--epoch", "3", "--resume", "first", ranks=1, folder=tmp_path)
    assert losses(tmp_path / "second")[-7:] != losses(tmp_path / "first")[-7:]
    assert close(losses(tmp_path / "second")[-7:], losses(alone / "runs/template")[-7:])


# ---- B: HaiScale


def check_haiscale(ended: Ended, ranks: int) -> None:
    for facts in ended.facts:
        assert "init_process_group" in facts["refused"]["no group"]
        assert "device" in facts["refused"]["two devices"]
        assert "weight, bias are not initialised yet" in facts["refused"]["lazy"]
        assert facts["first"] == [facts["first"][0]] * ranks
        for alone in ("switched_off", "local"):  # each rank's own gradients
            assert (facts[alone][0] != facts[alone][-1]) == (ranks > 1)
        assert facts["together"] == [facts["together"][0]] * ranks
        assert facts["weights"] == [facts["weights"][0]] * ranks
        assert facts["mine"] == [[float(rank)] for rank in range(ranks)]
        assert facts["loss"] < 1.3
    told = re.findall(r"\w*Warning.*", ended.err)  # none at the end; torch, too, wants another word for one option
    assert [each for each in told if "`broadcast_buffers` is deprecated" not in each] == []


def test_haiscales_script_on_two_ranks(tmp_path: Path) -> None:
    check_haiscale(start("by hand", "haiscale.py", ranks=2, folder=tmp_path), 2)
    meeting = ["--init_method", f"file://{tmp_path / 'meeting'}"]
    check_haiscale(start("python", "haiscale.py", *meeting, ranks=1, folder=tmp_path), 1)


# ---- C: torch.distributed.launch on several machines


def check_launched(ended: Ended, backend: str, argument: bool) -> None:
    first = ended.facts[0]
    assert len({facts["pid"] for facts in ended.facts}) == len(ended.facts)
    for facts in ended.facts:
        assert facts["weights"] == first["weights"]
        assert (facts["lr"], facts["backend"]) == (0.1, backend)
        assert facts["argument"] == (facts["local_rank"] if argument else -1)
        assert facts["losses"][-1] < facts["losses"][0]


def test_the_script_of_several_machines(tmp_path: Path) -> None:
    words = ["--lr", "0.1"]
    ended = start("torch.distributed.launch", "launched.py", *words, ranks=2, folder=tmp_path)
    check_launched(ended, "photinus", argument=True)
    assert [facts["local_rank"] for facts in ended.facts] == [0, 0]
    over_gloo = start("by hand", "launched.py", *words, "--backend", "gloo", ranks=2, folder=tmp_path)
    check_launched(over_gloo, "gloo", argument=False)
    assert close(ended.facts[0]["weights"], over_gloo.facts[0]["weights"])
    check_launched(start("by hand", "launched.py", *words, ranks=1, folder=tmp_path), "photinus", argument=False)


# ---- D: variables of the environment


def check_environment(ended: Ended, ranks: int) -> None:
    assert sum(facts["seen"] for facts in ended.facts) == 2 * 62
    assert len({json.dumps(facts["weights"]) for facts in ended.facts}) == 1
    assert ended.out.count(" backend photinus (") == 1
    assert ended.err.count(f"training on {ranks} process(es)") == 1
    assert ended.err.count("UserWarning: rank 1 has something to say") == int(ranks > 1)
    assert len(re.findall(r"100%\|", ended.err)) == 2  # one bar for each epoch


def test_the_script_of_variables(tmp_path: Path) -> None:
    two = start("by hand", "environment.py", ranks=2, folder=tmp_path)
    check_environment(two, 2)
    absent = {"RANK": "-1", "WORLD_SIZE": "1"}
    one = start("python", "environment.py", ranks=1, folder=tmp_path, environ=absent)
    check_environment(one, 1)
    assert close(two.facts[0]["weights"], one.facts[0]["weights"])
    mean = [sum(pair) / 2 for pair in zip(*(facts["losses"] for facts in two.facts), strict=True)]
    assert close(mean, one.facts[0]["losses"])


# ---- E: torchrun, DeepSpeed, Hugging Face


def check_strategies(folder: Path, alone: Path, ranks: int, strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        found = losses(folder / f"runs/{strategy}-{ranks}")
        assert len(found) == 2 * 4
        assert close(found, losses(alone / "runs/ddp-1")), strategy


def test_one_flag_chooses_the_strategy(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    words = ["--deepspeed", "ds_config.json", "--strategy", *STRATEGIES]
    start("torchrun", "strategies.py", *words, ranks=2, folder=tmp_path)
    check_strategies(tmp_path, alone, 2, STRATEGIES)
    rows = read_rows(alone / "runs/ddp-1/metrics.csv")
    assert rows[-1]["learning_rate"] == 0.01  # warmed up to what the file leaves to the command line
    (tmp_path / "ds_config.json").write_text(json.dumps({**CONFIG, "gradient_cliping": 1.0}))
    with pytest.raises(AssertionError, match=r"gradient_cliping.*gradient_clipping"):
        start("python", "strategies.py", *words[:2], ranks=1, folder=tmp_path)


# ---- all scripts in all ways

CHECKS: dict[str, Callable[[Ended, Path, Path, int, str], None]] = {
    "template.py": lambda ended, folder, alone, ranks, way: check_template(ended, folder, alone),
    "haiscale.py": lambda ended, folder, alone, ranks, way: check_haiscale(ended, ranks),
    "launched.py": lambda ended, folder, alone, ranks, way: check_launched(
        ended, "photinus", argument=way in ("photinus run", "torch.distributed.launch")
    ),
    "environment.py": lambda ended, folder, alone, ranks, way: check_environment(ended, ranks),
    "strategies.py": lambda ended, folder, alone, ranks, way: check_strategies(folder, alone, ranks, ("ddp",)),
}
WORDS = {"launched.py": ["--lr", "0.1"], "strategies.py": ["--deepspeed", "ds_config.json"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", CHECKS)
def test_each_script_runs_in_each_way(script: str, way: str, ranks: int, alone: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    ended = start(way, script, *WORDS.get(script, []), ranks=ranks, folder=tmp_path)
    CHECKS[script](ended, tmp_path, alone, ranks, way)


def test_every_row_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| ([A-EK]\d+) [^|]*\| (.*) \|$", __doc__ or "", re.MULTILINE)
    wanted = {"A": 12, "B": 9, "C": 4, "D": 6, "E": 7, "K": 5}
    assert [row for row, _ in rows] == [f"{way}{number + 1}" for way, most in wanted.items() for number in range(most)]
    for row, tests in rows:
        for test in tests.split("; "):
            assert test in globals() or (REPOSITORY / test).is_file(), f"{row}: {test}"
