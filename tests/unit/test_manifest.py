"""`photinus run --kubernetes`: the manifests, checked against the published schemas."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from photinus.launcher.command_line.flags import parse_run
from photinus.launcher.command_line.usage import UsageError
from photinus.launcher.schedulers.kubernetes import main, manifest

SCHEMAS = Path(__file__).parents[1] / "schedulers" / "schemas"
IMAGE = ["--image", "registry.example.org:5000/team/train:1"]
KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet"}


def written(kind: str, *words: str) -> list[dict[str, Any]]:
    flags = parse_run([f"--kubernetes={kind}", *words])
    return list(yaml.safe_load_all(manifest(flags)))


def job(kind: str, *words: str) -> dict[str, Any]:
    return written(kind, *IMAGE, *words)[1]


def pods(job: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(number of pods, their spec) for each kind of pod of a job."""
    if job["kind"] == "PyTorchJob":
        replicas = job["spec"]["pytorchReplicaSpecs"].values()
        return [(each["replicas"], each["template"]["spec"]) for each in replicas]
    (only,) = job["spec"]["replicatedJobs"]
    inner = only["template"]["spec"]
    assert inner["parallelism"] == inner["completions"]
    return [(inner["parallelism"], inner["template"]["spec"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["--nnodes", "4", "--nproc-per-node", "8", "--namespace", "team", "--name", "big", "train.py", "--lr", "0.1"],
        ["--nnodes", "2", "--cpu", "--nproc-per-node", "2", "-m", "pkg.train"],
    ],
    ids=["one pod", "four pods with GPUs", "two pods without"],
)
def test_manifests_fit_the_published_schema(kind: str, words: list[str]):
    schema = json.loads((SCHEMAS / f"{KINDS[kind]}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(job(kind, *words))


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_would_find_a_misspelt_field_and_a_wrong_type(kind: str):
    schema = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{KINDS[kind]}.json").read_text()))
    spoiled = job(kind, "--nnodes", "2", "train.py")
    container = pods(spoiled)[0][1]["containers"][0]
    container["imagePullSecret"] = "x"
    assert not schema.is_valid(spoiled)
    del container["imagePullSecret"]
    assert schema.is_valid(spoiled)
    container["ports"][0]["containerPort"] = "29500"
    assert not schema.is_valid(spoiled)


@pytest.mark.parametrize(
    ("kind", "rank", "leader"),
    [
        ("pytorchjob", "$(RANK)", "big-master-0"),
        ("jobset", "$(JOB_COMPLETION_INDEX)", "big-host-0-0.big"),
    ],
)
def test_each_pod_runs_one_launcher_that_knows_its_number_and_the_leader(kind: str, rank: str, leader: str):
    words = [
        "--nnodes",
        "3",
        "--nproc-per-node",
        "2",
        "--name",
        "big",
        "--max-restarts",
        "1",
        "train.py",
        "--lr",
        "0.1",
    ]
    made = job(kind, *words)
    assert sum(count for count, _ in pods(made)) == 3
    for _, pod in pods(made):
        (container,) = pod["containers"]
        assert container["command"] == ["python", "-m", "photinus", "run"]
        flags = parse_run([word.replace(rank, "2") for word in container["args"]])
        assert (flags.hosts.nnodes, flags.hosts.node_rank) == ((3, 3), 2)
        assert container["args"][:8] == [
            *("--nnodes", "3", "--node-rank", rank, "--master-addr", leader, "--master-port", "29500")
        ]
        assert container["args"][8:] == [
            *("--nproc-per-node", "2", "--max-restarts", "1"),
            *("train.py", "--lr", "0.1"),
        ]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
        assert container["ports"][0]["containerPort"] == 29500


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_one_pod_needs_no_meeting(kind: str):
    ((count, pod),) = pods(job(kind, "--cpu", "train.py"))
    assert count == 1
    assert pod["containers"][0]["args"] == ["--cpu", "train.py"]
    assert "resources" not in pod["containers"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_the_jobs_secret_and_nobody_else_reads_it(kind: str, tmp_path: Path):
    secret, made = written(kind, *IMAGE, "--name", "big", "--namespace", "team", "train.py")
    assert (secret["kind"], secret["type"]) == ("Secret", "Opaque")
    assert {secret["metadata"]["namespace"], made["metadata"]["namespace"]} == {"team"}
    assert re.fullmatch("[0-9a-f]{64}", secret["stringData"]["PHOTINUS_JOB_SECRET"])
    again, _ = written(kind, *IMAGE, "--name", "big", "train.py")
    assert again["stringData"] != secret["stringData"]
    for _, pod in pods(made):
        (variable,) = pod["containers"][0]["env"]
        reference = variable["valueFrom"]["secretKeyRef"]
        assert (variable["name"], reference) == (
            "PHOTINUS_JOB_SECRET",
            {"name": secret["metadata"]["name"], "key": "PHOTINUS_JOB_SECRET"},
        )
    target = tmp_path / "job.yaml"
    flags = parse_run([f"--kubernetes={kind}", *IMAGE, "--output", str(target), "train.py"])
    assert main(flags) == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_data_loaders_get_shared_memory():
    ((_, pod),) = pods(job("pytorchjob", "--nproc-per-node", "8", "train.py"))
    (volume,) = pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]


ODD = ["yes", "No", "null", "1e3", "0x10", "12:30", "a: b", "- x", "#x", "*a", "~", "", " ", "=", "<<", "a #b"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(ODD) | st.text(max_size=12), min_size=1, max_size=4))
def test_any_words_are_read_back_as_they_were(words: list[str]):
    ((_, pod),) = pods(job("pytorchjob", "--cpu", "train.py", *words))
    assert pod["containers"][0]["args"][2:] == [word.replace("$(", "$$(") for word in words]


@pytest.mark.parametrize("name", ["true", "on", "null", "y"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_that_are_words_of_yaml_are_names(kind: str, name: str):
    made = job(kind, "--cpu", "--name", name, "--namespace", name, "train.py")
    assert made["metadata"] == {
        "name": name,
        "namespace": name,
        "labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "photinus"},
    }


def test_words_that_kubernetes_would_replace_are_kept():
    ((_, pod),) = pods(job("pytorchjob", "--cpu", "train.py", "$(HOME)", "100%", "a: b", "yes", "1e3"))
    assert pod["containers"][0]["args"][1:] == ["train.py", "$$(HOME)", "100%", "a: b", "yes", "1e3"]


@pytest.mark.parametrize(
    ("program", "name"),
    [(["train.py"], "train"), (["-m", "My_pkg.train"], "my-pkg-train"), (["2024 run!.py"], "photinus-2024-run")],
)
def test_the_name_is_made_of_the_program(program: list[str], name: str):
    assert job("pytorchjob", "--cpu", *program)["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train.py"], "needs --image"),
        ([*IMAGE, "--nnodes", "1:4", "train.py"], "fixed number of pods"),
        ([*IMAGE, "--name", "Big_Job", "train.py"], "--name Big_Job: Kubernetes needs small letters"),
        ([*IMAGE, "--name", "x" * 41, "train.py"], "40 at most"),
        ([*IMAGE, "--namespace", "a.b", "train.py"], "--namespace a.b"),
        ([*IMAGE, "--nproc-per-node", "gpu", "train.py"], "--gpus-per-node N"),
        (["--image", "a b", "train.py"], "needs the name of an image"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(words: list[str], complaint: str):
    with pytest.raises(UsageError, match=complaint):
        written("pytorchjob", *words)


def test_a_kind_written_with_a_blank_is_told_how_to_write_it(tmp_path: Path):
    flags = parse_run(["--kubernetes", *IMAGE, "jobset", "train.py"])
    with pytest.raises(UsageError, match="--kubernetes=jobset"):
        main(flags)
