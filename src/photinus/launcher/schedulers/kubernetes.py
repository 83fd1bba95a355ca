"""`photinus run --kubernetes`: the manifest that starts this job on a cluster, for `kubectl apply`."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from ... import env
from ...version import __version__
from ..command_line.flags import RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError
from .inside import fill, gpus_per_host, program_words, put, run_words

# kind -> the operator that it needs, each pod's number, the address of the first, the name of the port
_KINDS = {
    "pytorchjob": ("Kubeflow's training operator", "$(RANK)", "{}-master-0", "pytorchjob-port"),
    "jobset": ("JobSet", "$(JOB_COMPLETION_INDEX)", "{0}-host-0-0.{0}", "photinus"),
}
_PORT = 29500
_MAX_RESTARTS = 3  # of pods, when photinus run has given up or its host is lost
_LONGEST_NAME = 40  # pods add to it, and their names have to fit into the 63 letters of a DNS label
_LEAVE_S = 60
_SHARED_GIB_PER_WORKER = 2
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def main(flags: RunFlags) -> int:
    """Writes the manifest to stdout or to `--output`, and returns the exit code. Raises UsageError."""
    target = flags.program.target
    if target in _KINDS and flags.program.kind == "script":
        raise UsageError(f"--kubernetes {target}: write it as --kubernetes={target}.")
    return put(manifest(flags), flags.scheduler.output, start="kubectl apply -f")


def manifest(flags: RunFlags) -> str:
    """The manifest's text: a Secret, and the job. UsageError: the image is missing, or what Kubernetes would refuse."""
    asked = flags.scheduler
    if not asked.image:
        raise UsageError(
            "--kubernetes needs --image IMAGE, a container image that has Photinus, PyTorch and your script in it."
        )
    if re.search(r"\s", asked.image):
        raise UsageError(f"--image {asked.image!r}: needs the name of an image, like registry/team/train:1.")
    least, hosts = flags.hosts.nnodes or (1, 1)
    if least != hosts:
        raise UsageError(
            f"--nnodes {least}:{hosts}: a manifest starts a fixed number of pods. Give one number; a pod that dies is "
            f"started anew, and training goes on from the last checkpoint."
        )
    gpus = gpus_per_host(flags) or 0
    workers = flags.nproc_per_node if isinstance(flags.nproc_per_node, int) else gpus
    if flags.nproc_per_node == "gpu" and not gpus:
        raise UsageError("--nproc-per-node gpu: how many GPUs shall each pod get? Give --gpus-per-node N.")
    kind = asked.kubernetes or "pytorchjob"
    operator, host_rank, leader, port_name = _KINDS[kind]
    name = _name(asked.name, flags.program)
    meeting = ["--nnodes", str(hosts), "--node-rank", host_rank]
    meeting += ["--master-addr", leader.format(name), "--master-port", str(_PORT)]
    # $(X) in a word of the user's is no variable of Kubernetes'.
    words = [word.replace("$(", "$$(") for word in program_words(flags.program)]
    return fill(
        "manifest.yaml.j2",
        kind=kind,
        operator=operator,
        version=__version__,
        name=name,
        namespace=None if asked.namespace is None else _check_name("--namespace", asked.namespace, 63),
        image=asked.image,
        hosts=hosts,
        gpus=gpus,
        # The most that /dev/shm may hold; part of the pod's memory.
        shared_gib=max(2, _SHARED_GIB_PER_WORKER * (workers or 8)),
        arguments=[*(meeting if hosts > 1 else []), *run_words(flags), *words],
        port=_PORT,
        port_name=port_name,
        leave_s=_LEAVE_S,
        max_restarts=_MAX_RESTARTS,
        # All pods of the job get it, and nobody else: launchers that do not know it are turned away.
        secret_name=env.JOB_SECRET.name,
        secret=secrets.token_hex(32),
    )


def _name(given: str | None, program: Program) -> str:
    if given is not None:
        return _check_name("--name", given, _LONGEST_NAME)
    stem = Path(program.target).stem if program.kind != "module" else program.target
    made = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return made if _LABEL.fullmatch(made) else f"photinus-{made}".strip("-")


def _check_name(flag: str, name: str, longest: int) -> str:
    if _LABEL.fullmatch(name) and len(name) <= longest:
        return name
    raise UsageError(
        f"{flag} {name}: Kubernetes needs small letters, digits and dashes, a letter first, {longest} at most."
    )
