"""What every manifest of ours has: the pod of one host, the job's secret, and names that Kubernetes accepts."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from ... import env
from ..command_line.flags import RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError
from .inside import asked_gpus, program_words, run_words
from .yaml_text import Plain

__all__ = ["MAX_RESTARTS", "PORT", "JobParts", "job_parts", "pod_spec", "secret_object"]

PORT = 29500
MAX_RESTARTS = 3  # of pods, when photinus run has given up or its host is lost
_LONGEST_NAME = 40  # pods add to it, and their names have to fit into the 63 letters of a DNS label
_LEAVE_S = 60
_SHARED_GIB_PER_WORKER = 2
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class JobParts:
    """A job for Kubernetes as the flags describe it.

    Attributes:
        name: of the job, a DNS label.
        namespace: None: the one that kubectl chooses.
        image: container image with Photinus, the program and its data, or where to find them.
        hosts: number of pods.
        gpus: of each pod; 0: none.
        shared_gib: the most that /dev/shm may hold, which data loaders use; part of the pod's memory.
        run: flags of `photinus run` in the pod, without those that say which hosts there are.
        program: the program's words.
    """

    name: str
    namespace: str | None
    image: str
    hosts: int
    gpus: int
    shared_gib: int
    run: tuple[str, ...]
    program: tuple[str, ...]

    def metadata(self, name: str | None = None) -> dict[str, Plain]:
        """Name, namespace and label of an object of this job."""
        found: dict[str, Plain] = {"name": name or self.name}
        if self.namespace is not None:
            found["namespace"] = self.namespace
        return {**found, "labels": {"app.kubernetes.io/name": self.name, "app.kubernetes.io/managed-by": "photinus"}}


def job_parts(flags: RunFlags, program: Program) -> JobParts:
    """What the manifest is made of.

    Raises:
        UsageError: the image is missing, or a name or number that Kubernetes would refuse.
    """
    asked = flags.scheduler
    if not asked.image:
        raise UsageError(
            "--kubernetes needs --image IMAGE, a container image that has Photinus, PyTorch and your script in it."
        )
    if re.search(r"\s", asked.image):
        raise UsageError(f"--image {asked.image!r}: needs the name of an image, like registry/team/train:1.")
    least, most = flags.hosts.nnodes or (1, 1)
    if least != most:
        raise UsageError(
            f"--nnodes {least}:{most}: a manifest starts a fixed number of pods. Give one number; a pod that dies is "
            f"started anew, and training goes on from the last checkpoint."
        )
    gpus = asked_gpus(flags) or 0
    run = run_words(flags)
    workers = flags.nproc_per_node if isinstance(flags.nproc_per_node, int) else gpus
    if flags.nproc_per_node == "gpu" and not gpus:
        raise UsageError("--nproc-per-node gpu: how many GPUs shall each pod get? Give --gpus-per-node N.")
    return JobParts(
        name=_name(asked.name, program),
        namespace=_checked("--namespace", asked.namespace, 63) if asked.namespace is not None else None,
        image=asked.image,
        hosts=most,
        gpus=gpus,
        shared_gib=max(2, _SHARED_GIB_PER_WORKER * (workers or 8)),
        run=tuple(run),
        program=tuple(program_words(program)),
    )


def secret_object(parts: JobParts) -> dict[str, Plain]:
    """The Secret that all pods of the job get, and nobody else: launchers that do not know it are turned away."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": parts.metadata(f"{parts.name}-secret"),
        "type": "Opaque",
        "stringData": {env.JOB_SECRET.name: secrets.token_hex(32)},
    }


def pod_spec(parts: JobParts, *, host_rank: str, leader: str, port_name: str, restart: str | None) -> dict[str, Plain]:
    """The spec of one host's pod.

    Args:
        parts: the job.
        host_rank: this pod's number, or $(NAME) of a variable that holds it.
        leader: DNS name of the pod with rank 0.
        port_name: of the port at which the hosts meet.
        restart: restartPolicy of the pod; None leaves it out.
    """
    hosts = [
        "--nnodes",
        str(parts.hosts),
        "--node-rank",
        host_rank,
        "--master-addr",
        leader,
        "--master-port",
        str(PORT),
    ]
    words: list[Plain] = [*(hosts if parts.hosts > 1 else []), *parts.run, *(_kept(word) for word in parts.program)]
    container: dict[str, Plain] = {
        "name": "pytorch",  # the training operator looks for this name
        "image": parts.image,
        "command": ["python", "-m", "photinus", "run"],
        "args": words,
        "env": [
            {
                "name": env.JOB_SECRET.name,
                "valueFrom": {"secretKeyRef": {"name": f"{parts.name}-secret", "key": env.JOB_SECRET.name}},
            }
        ],
        "ports": [{"name": port_name, "containerPort": PORT}],
    }
    if parts.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": parts.gpus}}
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    spec: dict[str, Plain] = {} if restart is None else {"restartPolicy": restart}
    return {
        **spec,
        "terminationGracePeriodSeconds": _LEAVE_S,
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{parts.shared_gib}Gi"}}],
    }


def _kept(word: str) -> str:
    """A word of the user's in which Kubernetes finds no variable of its own to replace: $(X) is written $$(X)."""
    return word.replace("$(", "$$(")


def _name(given: str | None, program: Program) -> str:
    if given is not None:
        return _checked("--name", given, _LONGEST_NAME)
    stem = Path(program.target).stem if program.kind != "module" else program.target
    made = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return made if _LABEL.fullmatch(made) else f"photinus-{made}".strip("-")


def _checked(flag: str, name: str, longest: int) -> str:
    if _LABEL.fullmatch(name) and len(name) <= longest:
        return name
    raise UsageError(
        f"{flag} {name}: Kubernetes needs small letters, digits and dashes, a letter first, {longest} at most."
    )
