"""The manifests of examples/kubernetes, checked against the published schemas and against `photinus run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from photinus import env
from photinus.cli.flags import parse_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
SCHEMAS = Path(__file__).parents[1] / "schedulers" / "schemas"
KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet"}
RANK = {"pytorchjob": "$(RANK)", "jobset": "$(JOB_COMPLETION_INDEX)"}


def read(kind: str) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """The manifest, and (number of pods, their spec) for each kind of pod."""
    job = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())
    assert job["kind"] == KINDS[kind]
    if kind == "pytorchjob":
        replicas = job["spec"]["pytorchReplicaSpecs"].values()
        return job, [(each["replicas"], each["template"]["spec"]) for each in replicas]
    (only,) = job["spec"]["replicatedJobs"]
    inner = only["template"]["spec"]
    assert inner["parallelism"] == inner["completions"]
    return job, [(inner["parallelism"], inner["template"]["spec"])]


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_fit_the_published_schema_which_finds_a_misspelt_field_and_a_wrong_type(kind: str) -> None:
    schema = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{KINDS[kind]}.json").read_text()))
    job, pods = read(kind)
    schema.validate(job)
    container = pods[0][1]["containers"][0]
    container["imagePullSecret"] = "x"
    assert not schema.is_valid(job)
    del container["imagePullSecret"]
    container["ports"][0]["containerPort"] = "29500"
    assert not schema.is_valid(job)


@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_runs_one_launcher_that_knows_its_number_the_leader_and_the_secret(kind: str) -> None:
    job, pods = read(kind)
    name = job["metadata"]["name"]
    for _, pod in pods:
        (container,) = pod["containers"]
        assert container["command"] == ["python", "-m", "photinus", "run"]
        flags = parse_run([word.replace(RANK[kind], "1") for word in container["args"]])
        pod_count = sum(count for count, _ in pods)
        assert (flags.spec.hosts.nnodes, flags.spec.hosts.node_rank) == ((pod_count, pod_count), 1)
        leader = f"{name}-master-0" if kind == "pytorchjob" else f"{name}-host-0-0.{name}"
        assert flags.spellings["--master-addr"][1] == leader
        assert flags.spellings["--master-port"][1] == str(container["ports"][0]["containerPort"])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == flags.spec.nproc_per_node
        (variable,) = container["env"]
        assert (variable["name"], variable["valueFrom"]["secretKeyRef"]["key"]) == (env.JOB_SECRET.name,) * 2
        (volume,) = pod["volumes"]  # data loaders pass batches through it
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert volume["emptyDir"]["medium"] == "Memory"
