"""The job of a host, planned without a process: what is refused, what is decided before GPUs are counted, and when."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from photinus.errors import LaunchError, OldTorchError, UsageError
from photinus.job.spec import HostSpec, JobSpec, LogSpec, Program
from photinus.run.local.job import Job
from photinus.run.plan import dry_run_text, place_on_gpus, plan

ENVIRON = {"PATH": os.defpath}
TRUE = Program("program", "true")


def no_gpus(kind: str, environ: Mapping[str, str]) -> int:
    raise AssertionError("GPUs do not matter here")


def placed(spec: JobSpec, gpus: int = 0, environ: Mapping[str, str] = ENVIRON) -> Job:
    return place_on_gpus(plan(spec, environ), lambda kind, environ: gpus, cores=lambda: 3)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (JobSpec(TRUE, 2), 2),
        (JobSpec(TRUE, devices=(0, 3), ranks_per_gpu=2), 4),
        (JobSpec(TRUE, 4, devices=(0, 3), ranks_per_gpu=2, choice="--include localhost:0,3"), 4),
        (JobSpec(TRUE), 0),
        (JobSpec(TRUE, "gpu"), 0),
        (JobSpec(TRUE, 2, without_devices=(1,), choice="--exclude localhost:1"), 0),
        (JobSpec(TRUE, cpu=True, devices=(0, 3), choice="--include localhost:0,3"), 2),
    ],
)
def test_the_number_of_workers_is_known_before_gpus_are_counted_where_it_was_typed(spec: JobSpec, workers: int) -> None:
    assert plan(spec, ENVIRON).local_world_size == workers


def test_gpus_are_not_counted_where_they_have_no_effect() -> None:
    job = place_on_gpus(plan(JobSpec(TRUE, 2, cpu=True), ENVIRON), no_gpus, cores=lambda: 1)
    assert (job.local_world_size, job.gpus, job.notes) == (2, (), ())
    assert place_on_gpus(plan(JobSpec(TRUE, cpu=True), ENVIRON), no_gpus, cores=lambda: 3).local_world_size == 3


def test_a_host_with_gpus_has_a_worker_for_each_and_says_so() -> None:
    job = placed(JobSpec(TRUE, started_as="b"), gpus=2, environ={**ENVIRON, "CUDA_VISIBLE_DEVICES": "5,7"})
    assert (job.local_world_size, job.gpus) == (2, ("GPU 5", "GPU 7"))
    assert job.notes == ("host b: 2 workers (one per GPU)",)


def test_gpus_that_were_chosen_are_counted_among_the_visible_ones_and_the_only_ones_that_workers_see() -> None:
    environ = {**ENVIRON, "CUDA_VISIBLE_DEVICES": "4,5,6"}
    asked: list[str] = []

    def count_gpus(kind: str, environ: Mapping[str, str]) -> int:
        asked.append(environ["CUDA_VISIBLE_DEVICES"])
        return 2

    job = place_on_gpus(plan(JobSpec(TRUE, devices=(2, 0), ranks_per_gpu=2), environ), count_gpus, cores=lambda: 1)
    assert (job.local_world_size, job.gpus) == (4, ("GPU 6", "GPU 6", "GPU 4", "GPU 4"))
    assert asked == [job.base_environ["CUDA_VISIBLE_DEVICES"]] == ["6,4"]


def test_the_users_environment_and_the_command_line_are_the_workers() -> None:
    job = placed(JobSpec(TRUE, 1, typed="photinus run true"), environ={**ENVIRON, "MINE": "1", "PHOTINUS_LAUNCH": "x"})
    own = {"MINE": "1", "PHOTINUS_RANKS_PER_GPU": "1", "PHOTINUS_LAUNCH": "photinus run true"}
    assert job.base_environ == {**ENVIRON, **own}
    assert placed(JobSpec(TRUE, 1), environ={"PHOTINUS_LAUNCH": "x"}).base_environ["PHOTINUS_LAUNCH"] == "x"


@pytest.mark.parametrize(
    ("spec", "environ", "told"),
    [
        (JobSpec(Program("script", "absent.py")), {}, "script absent.py does not exist"),
        (JobSpec(TRUE), {"PHOTINUS_TIMEOUT_S": "soon"}, "environment variable PHOTINUS_TIMEOUT_S='soon'"),
        (JobSpec(TRUE, 13, cpu=True), {}, "--nproc-per-node 13 asks for 13 workers, but this host has 3 usable cores"),
        (JobSpec(TRUE, 2, logs=LogSpec(tee={2: frozenset({"out"})})), {}, "--tee names local rank 2, but this host"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    spec: JobSpec, environ: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        placed(spec, environ={**ENVIRON, **environ})
    assert told in str(caught.value)


def test_a_python_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="photinus run needs PyTorch, which"):
        plan(JobSpec(TRUE), ENVIRON)


def test_a_torch_that_is_too_old_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise OldTorchError

    monkeypatch.setattr("photinus.run.plan.check_torch", too_old)
    with pytest.raises(OldTorchError):
        plan(JobSpec(TRUE), ENVIRON)


def test_notes_are_printed_once_for_all_hosts_that_share_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("parser.add_argument('--local_rank', type=int)\n")
    program, environ = Program("script", str(script)), {**ENVIRON, "PHOTINUS_TIMEOUT": "9"}
    unknown = "environment variable PHOTINUS_TIMEOUT is unknown. Did you mean PHOTINUS_TIMEOUT_S?"
    taken = f"{script} takes --local_rank: each worker gets it (to omit it: --use-env)"
    for hosts, name, notes in (
        (HostSpec(), None, (unknown, taken)),
        (HostSpec((2, 2), 1), None, (unknown, taken)),  # typed on each host
        (HostSpec((2, 2), 0), "a", (unknown, taken)),
        (HostSpec((2, 2), 1), "b", ()),
    ):
        job = plan(JobSpec(program, hosts=hosts, started_as=name), environ)
        assert job.notes == notes
        assert job.spec.program.local_rank_flag == "--local_rank"
    assert plan(JobSpec(program, use_env=True), ENVIRON).spec.program.local_rank_flag is None


def test_the_text_of_a_plan_names_the_program_the_workers_and_their_variables() -> None:
    text = dry_run_text(placed(JobSpec(Program("program", "true", ("--hf_token", "abc")), 2)), "--no-python")
    assert "2 workers on " in text
    assert "  true --hf_token '***'" in text
    assert "start method: spawn: --no-python" in text
    assert "  LOCAL_RANK=1 RANK=1 ROLE_RANK=1" in text
