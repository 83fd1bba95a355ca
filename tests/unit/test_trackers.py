"""TensorBoard, Weights & Biases and MLflow get a run's numbers, read back by their own readers and formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import photinus
from photinus.errors import PhotinusError
from photinus.runlog.tables import read_rows
from tests.fork_server import REPOSITORY
from tests.small_run import CutOffError, train
from tests.unit.test_loggers import reporting

# A script, so that what the packages start ends with it. Step 11 is logged and cut off, step 8 is saved.
SCRIPT = """
import random, sys, torch
import photinus
from tests.small_run import CutOffError, train
random.seed(3)
loggers = {loggers}
report = photinus.Reporting(progress=False, loggers=loggers, config={{"api_key": "secret"}})
try:
    done = train(sys.argv[1], save_every=4, cut_at_step=int(sys.argv[2]) or None, report=report)["fingerprint"]
except CutOffError:
    done = "cut off"
print(done, random.random(), float(torch.rand(1)))
"""


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert found.Tags()["images"] in ([], ["curves"])
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def losses_of(out: Path) -> list[tuple[float, Any]]:
    return [(row["step"], pytest.approx(row["loss"])) for row in read_rows(out / "losses.csv")]


def run_script(out: Path, loggers: str, cut_at_step: int = 0) -> tuple[list[str], str]:
    """Train in a process of its own; returns what it says of loggers, and its weights and numbers drawn after it."""
    program = SCRIPT.format(loggers=loggers)
    done = subprocess.run(
        [sys.executable, "-c", program, str(out), str(cut_at_step)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=REPOSITORY,
        env={**os.environ, "HOME": str(out.parent), "TMPDIR": str(out.parent), "WANDB_ERROR_REPORTING": "false"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    return [line for line in lines if "is dropped" in line], last


def test_a_run_cut_off_and_gone_on_with_shows_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=11, report=reporting(photinus.TensorBoard()))
    train(tmp_path, save_every=4, report=reporting(photinus.TensorBoard(), curves=True))
    found = scalars(tmp_path)
    assert found["loss/step"] == losses_of(tmp_path)
    assert [step for step, _ in found["epoch/right"]] == [6, 12, 18]
    assert {"loss/epoch", "learning_rate", "samples_per_s", "step_ms/forward", "memory_mib/rank_0"} <= set(found)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_each_new_folder_of_tensorboard_has_the_options_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (8, 16):  # of a run that goes on from another one's checkpoint
        logger = photinus.TensorBoard()
        logger.start({"out": str(tmp_path), "resumed_step": step})
        logger.end("finished")
    found: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [each.step for each in found.Tensors("config/text_summary")] == [0]


@pytest.mark.parametrize(
    ("logger", "module"),
    [
        (photinus.TensorBoard(), "torch.utils.tensorboard"),
        (photinus.Wandb(), "wandb"),
        (photinus.MLflow(), "mlflow"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_without_its_package_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PhotinusError, match=rf"needs the package \w+, .*: pip install {module.split('.')[-1]};"):
        train(tmp_path / "run", report=reporting(logger))
    assert not (tmp_path / "run").exists()


# Reads a run of W&B's mode "offline": records of protobuf, in blocks as LevelDB's log has them.
WANDB_READER = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record
data, place, part, found = open(sys.argv[1], "rb").read(), 7, b"", {"rows": []}
while place + 7 <= len(data):
    if 32768 - place % 32768 < 7:
        place += 32768 - place % 32768  # a block's padding
        continue
    _, length, kind = struct.unpack_from("<IHB", data, place)
    part += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind not in (1, 4):  # neither a whole record, nor the last part of one
        continue
    record, part = Record.FromString(part), b""
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found.update(id=record.run.run_id, project=record.run.project)
        found["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    elif kind == "history":
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        found["rows"].append([record.history.step.num, row])
    elif kind == "exit":
        found["exit_code"] = record.exit.exit_code
print(json.dumps(found))
"""


def run_reader(program: str, *words: object) -> Any:
    """Read in a process of its own what a package wrote: its import leaves folders for temporary files."""
    environ = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the extra {package} is not installed")


@pytest.mark.slow
def test_wandb_offline_holds_the_run_and_after_a_resume_the_same_run_goes_on(tmp_path: Path) -> None:
    needs("wandb")
    out, logger = tmp_path / "run", '[photinus.Wandb(project="digits", mode="offline")]'
    plain = run_script(tmp_path / "plain", "[]")
    assert run_script(out, logger, 11)[1].startswith("cut off")
    assert run_script(out, logger) == plain
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    first, second = (run_reader(WANDB_READER, file) for file in files)
    for found, exit_code in ((first, 1), (second, 0)):
        assert (found["id"], found["project"]) == ((out / "wandb" / "run-id").read_text(), "digits")
        assert (found["config"]["batch_size"], found["config"]["api_key"]) == (8, "***")
        assert found["exit_code"] == exit_code

    def logged(found: Any, name: str) -> dict[int, float]:
        return {step: row[name] for step, row in found["rows"] if name in row}

    losses = {**logged(first, "loss/step"), **logged(second, "loss/step")}
    assert sorted(losses.items()) == losses_of(out)
    assert min(logged(second, "loss/step")) == 9
    assert list(logged(second, "epoch/right")) == [12, 18]
    assert list((out / "wandb").glob("offline-run-*/files/media/images/curves*.png"))


@pytest.mark.slow
def test_wandb_online_without_a_key_is_dropped_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "")
    (line,), done = run_script(tmp_path / "run", "[photinus.Wandb()]")
    assert line.startswith(
        "warning: the logger Wandb is dropped, the training is not affected: start raised UsageError"
    )
    assert ([], done) == run_script(tmp_path / "plain", "[]")


MLFLOW_READER = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("digits")
(run,) = client.search_runs([experiment.experiment_id])
history = {name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics}
artifacts = [each.path for each in client.list_artifacts(run.info.run_id)]
print(json.dumps([run.info.run_id, run.info.run_name, run.info.status, run.data.params, history, artifacts]))
"""


@pytest.mark.slow
def test_mlflow_holds_the_run_and_after_a_resume_the_same_run_goes_on(tmp_path: Path) -> None:
    needs("mlflow")
    out, logger = tmp_path / "run", '[photinus.MLflow(experiment="digits")]'
    plain = run_script(tmp_path / "plain", "[]")
    assert run_script(out, logger, 11)[1].startswith("cut off")
    uri = (out / "mlflow").as_uri()
    run_id, name, status, params, *_ = run_reader(MLFLOW_READER, uri)
    assert (name, status, params["batch_size"], params["api_key"]) == ("run", "FAILED", "8", "***")
    assert run_script(out, logger) == plain
    again, _, status, _, history, artifacts = run_reader(MLFLOW_READER, uri)
    assert (again, status) == (run_id, "FINISHED")
    assert [tuple(each) for each in history["loss/step"]] == losses_of(out)  # each step once
    assert [step for step, _ in history["epoch/right"]] == [6, 12, 18]
    assert artifacts == ["curves.png"]
    assert (out / "mlflow" / "run-id").read_text() == run_id


def test_mlflow_takes_any_name_that_loop_log_takes() -> None:
    from photinus.trainer.record.loggers import _name_for_mlflow

    assert _name_for_mlflow("epoch/f1 (macro)@5%") == "epoch/f1 _macro__5_"
