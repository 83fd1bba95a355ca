from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import photinus
from photinus.errors import DeviceError, NotInitializedError, WorldSizeError
from photinus.job.world import World
from photinus.parallel.exchange.agreement import from_rank_0, together
from photinus.trainer.session.session import Session, choose_backend, choose_device, current_session, require_session
from tests.small_run import train

_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PHOTINUS_WORLD_SIZE",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    yield
    assert current_session() is None
    assert not dist.is_initialized()


def test_one_process_without_a_launcher_is_a_world_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    with photinus.init("gloo", "cpu") as world:
        assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (0, 0, 1, 1)
        assert world.is_main
        assert world.device == torch.device("cpu")
        assert dist.get_world_size() == 1
        assert len(world.hosts) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["photinus: 1 rank on 1 host, device cpu (as asked), backend gloo (as asked)"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_the_group_is_destroyed_when_the_body_raises(error: BaseException) -> None:
    with pytest.raises(type(error)), photinus.init("gloo", "cpu"):
        raise error
    assert not dist.is_initialized()


def test_a_group_that_was_there_is_kept_and_left_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        with photinus.init("auto", "cpu") as world:
            assert world.backend == "gloo"
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_of_another_size_than_the_launcher_means_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        with pytest.raises(WorldSizeError, match=r"rank 0 of 2 processes.*rank 0 of 1"):
            photinus.init("gloo", "cpu")
    finally:
        dist.destroy_process_group()


def test_a_world_size_that_the_launcher_did_not_mean_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_WORLD_SIZE", "2")
    with pytest.raises(WorldSizeError, match=r"world of 2 processes.*world of 1"):
        photinus.init("gloo", "cpu")


def test_a_process_alone_in_a_slurm_job_of_several_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(WorldSizeError, match=r"has 4 tasks.*a world of 1"):
        photinus.init("gloo", "cpu")
    monkeypatch.setenv("PHOTINUS_WORLD_SIZE", "1")
    with photinus.init("gloo", "cpu") as world:
        assert world.world_size == 1


@pytest.mark.parametrize("piece", ["Loop", "evaluate", "backward", "wrap"])
def test_pieces_used_before_init_under_a_launcher_say_so(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    calls = {
        "Loop": lambda: photinus.Loop(model, torch.optim.SGD(model.parameters()), data, batch_size=4, epochs=1),
        "evaluate": lambda: photinus.evaluate(model, data, lambda x, y: y),
        "backward": lambda: photinus.backward(model(torch.zeros(1, 2)).sum()),
        "wrap": lambda: photinus.wrap(model),
    }
    with pytest.raises(NotInitializedError, match=rf"{piece} was used before photinus.init\(\).*rank 1 of 4 processes"):
        calls[piece]()


def test_a_piece_used_without_launcher_and_init_opens_a_world_of_one() -> None:
    session = require_session("a test")
    try:
        assert session.world_size == 1
        assert require_session("a test") is session
    finally:
        session.close()


def test_a_launcher_that_does_not_say_where_to_meet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(NotInitializedError, match="MASTER_PORT is not set"):
        photinus.init("gloo", "cpu")


@pytest.mark.parametrize(
    ("variables", "given"),
    [({"SLURM_GPUS_PER_TASK": "1"}, True), ({"SLURM_GPU_BIND": "verbose,single:1"}, True), ({}, False)],
)
def test_tasks_that_slurm_shows_one_gpu_each_take_it(
    variables: dict[str, str], given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    third = World(2, 4, 2, 4, 0, "Slurm")
    if given:
        assert choose_device("cuda", third, cuda_devices=1)[0] == torch.device("cuda", 0)
    else:
        with pytest.raises(DeviceError, match="local rank 2 of 4 ranks on this host, but only 1"):
            choose_device("cuda", third, cuda_devices=1)


def test_auto_takes_the_cpu_where_there_is_no_cuda() -> None:
    device, reason = choose_device("auto", World(), cuda_devices=0)
    assert (str(device), reason) == ("cpu", "no CUDA device here")


def test_auto_gives_each_local_rank_a_device_of_its_own() -> None:
    place = World(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert str(choose_device("auto", place, cuda_devices=4)[0]) == "cuda:1"
    assert str(choose_device("cuda", place, cuda_devices=4)[0]) == "cuda:1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_asked_for_and_absent_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"'cuda' was asked for on rank 0, but .*--device cpu"):
        photinus.init("gloo", "cuda")


@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_ranks_than_devices_are_refused_on_every_rank_with_both_numbers(local_rank: int) -> None:
    place = World(rank=local_rank, world_size=4, local_rank=local_rank, local_world_size=4)
    with pytest.raises(DeviceError, match=r"of 4 ranks on this host, but only 2 CUDA devices"):
        choose_device("auto", place, cuda_devices=2)


def test_a_device_index_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"'cuda:3' does not exist: 2"):
        choose_device("cuda:3", World(), cuda_devices=2)


def test_a_word_that_is_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device='gpu' is not a device"):
        choose_device("gpu", World(), cuda_devices=0)


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"backend 'gluu' is not available; known here: .*gloo"):
        choose_backend("gluu", torch.device("cpu"))


def test_a_backend_in_capitals_is_the_same_as_in_torch() -> None:
    with photinus.init("GLOO", "cpu") as world:
        assert world.backend == "gloo"
    with photinus.init("Photinus", "cpu") as world:
        assert world.backend == "photinus"


def test_the_environment_variable_chooses_the_backend_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_BACKEND", "gloo")
    assert choose_backend("auto", torch.device("cpu")) == ("gloo", "PHOTINUS_BACKEND is set")


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s=0"):
        photinus.init("gloo", "cpu", timeout_s=0)


def test_the_seed_makes_equal_models() -> None:
    def first_weights() -> torch.Tensor:
        with photinus.init("gloo", "cpu", seed=3):
            return torch.nn.Linear(4, 4).weight.detach()

    assert torch.equal(first_weights(), first_weights())


def test_errors_are_raised_together_even_in_a_world_of_one() -> None:
    with photinus.init("gloo", "cpu") as world:
        assert isinstance(world, Session)
        with together("testing"):
            pass
        with pytest.raises(OSError, match="disk"):
            from_rank_0(lambda: (_ for _ in ()).throw(OSError("disk")), "testing")


def test_a_forked_child_survives_the_garbage_of_earlier_runs() -> None:
    gc.disable()  # so that the child finds what this process has not collected yet
    try:
        for _ in range(2):
            train(None, epochs=1)
        with photinus.init("gloo", "cpu"):
            child = os.fork()
            if child == 0:
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
@pytest.mark.seconds
def test_nothing_is_said_at_exit(end: str, tmp_path: Path) -> None:
    script = f"""
import photinus, torch
with photinus.init("gloo", "cpu") as world:
    photinus.evaluate(torch.nn.Linear(1, 1), [(torch.zeros(1), torch.zeros(1))], lambda o, t: o[:, 0])
    {end}
"""
    done = _run(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.seconds
def test_nothing_is_said_at_exit_of_a_session_that_opened_itself(tmp_path: Path) -> None:
    script = """
import photinus, torch
photinus.evaluate(torch.nn.Linear(1, 1), [(torch.zeros(1), torch.zeros(1))], lambda o, t: o[:, 0])
"""
    done = _run(tmp_path, script, PHOTINUS_BACKEND="gloo")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("before", "after", "end"), [("error", "None", "end"), ("None", "error", "error")])
@pytest.mark.seconds
def test_an_error_from_before_a_session_does_not_end_its_runs(
    before: str, after: str, end: str, tmp_path: Path
) -> None:
    script = f"""
import photinus, sys, torch
error = ValueError("of another cell")
sys.last_value = {before}
photinus.init("gloo", "cpu", seed=0)
model, optimizer = photinus.wrap(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1))
for x in photinus.Loop(model, optimizer, torch.zeros(8, 1), batch_size=4, epochs=1, out="run"):
    break
sys.last_value = {after} or sys.last_value
"""
    assert _run(tmp_path, script).returncode == 0
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["event"] == end


def _run(tmp_path: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    # Not forked: at the end of a process Triton, which other tests may have imported, tells what it leaks.
    (tmp_path / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
