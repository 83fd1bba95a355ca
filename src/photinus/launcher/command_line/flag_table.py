"""The flags of `photinus run` with their words, the help made of them, and the names that other launchers use."""

from __future__ import annotations

from dataclasses import dataclass

from .usage import UsageError, closest

__all__ = ["FLAGS", "HELP", "Flag", "find"]


@dataclass(frozen=True)
class Flag:
    """A flag, what stands for its value in messages (empty for a switch), and what it does."""

    name: str
    value: str
    meaning: tuple[str, ...]
    repeated: bool = False


_GROUPS = {
    "workers": (
        Flag(
            "--nproc-per-node",
            "N|auto|gpu|cpu",
            (
                "workers on a host. auto: one per GPU, or one per usable",
                "core where there is no GPU. default: auto",
            ),
        ),
        Flag("--cpu", "", ("train on the CPU: the workers see no GPU",)),
        Flag("--device", "0,3", ("the workers see these GPUs only, one each",)),
        Flag("--oversubscribe", "", ("more than 4 workers on a core are meant",)),
        Flag("--ranks-per-gpu", "N", ("so many workers share each GPU, over gloo; to try a job",)),
        Flag("--num-gpus", "N", ("so many workers on a host, each with a GPU",)),
        Flag(
            "--max-restarts",
            "K",
            ("start all workers anew, at most K times, when one fails.", "default: 3"),
        ),
        Flag(
            "--stop-grace",
            "SECONDS",
            (
                "time to leave, or to save, for workers that are asked to",
                "by SIGTERM, before they are killed. default: 30",
            ),
        ),
        Flag("--preempt-after", "SECONDS", ("a trial: after so long, all save, leave and start again",)),
        Flag("--use-env", "", ("do not give --local_rank to a script that takes it",)),
        Flag("--no-python", "", ("what follows is a program, not a Python script",)),
        Flag("-m", "MODULE", ("run a module, as `python -m` does; ends the flags",)),
        Flag("--dry-run", "", ("only say what would be started, with which environment",)),
        Flag("--help", "", ("this text",)),
    ),
    "several hosts, the same command on each": (
        Flag(
            "--nnodes",
            "N|LEAST:MOST",
            ("hosts of the job; LEAST:MOST: they may come and go.", "default: 1"),
        ),
        Flag("--node-rank", "R", ("which host this is, from 0; default: as they come",)),
        Flag("--master-addr", "HOST", ("the host that leads, where the others find it",)),
        Flag("--master-port", "PORT", ("and its port; 0 on one host: any. default: 29500",)),
        Flag("--rdzv-endpoint", "HOST:PORT", ("the same two in one",)),
        Flag("--rdzv-id", "ID", ("the job's name: hosts of another are refused",)),
        Flag("--rdzv-backend", "NAME", ("c10d or static, as in torchrun; the same here",)),
        Flag(
            "--rdzv-conf",
            "KEY=VALUE,...",
            (
                "join_timeout: seconds to wait for the other hosts (600);",
                "last_call_timeout: to wait for more than the least (5);",
                "heartbeat_timeout: until a silent host counts as lost (30)",
            ),
        ),
        Flag("--local-addr", "ADDRESS", ("of this host, to listen on and be reached at",)),
    ),
    "several hosts, started from here over ssh": (
        Flag("--hostfile", "FILE", ("lines like `host slots=4`",)),
        Flag("--include", "HOST:0,1@HOST2", ("only these hosts and devices of the file, or of localhost",)),
        Flag("--exclude", "HOST:0@HOST2", ("all but these",)),
        Flag("--num-nodes", "N", ("the first N hosts of the file",)),
        Flag("--ssh", "COMMAND", ("how to reach them. default: ssh",)),
        Flag("--ssh-port", "PORT", ("the port of their ssh",)),
        Flag("--export", "NAME,...", ("environment variables to hand over as well",), repeated=True),
    ),
    "output": (
        Flag("--log-dir", "DIR", ("the output of each rank also in files there",)),
        Flag("--redirects", "0..3", ("1 stdout, 2 stderr, 3 both: to the files only",)),
        Flag("--tee", "0..3", ("the same, to the files and the terminal",)),
        Flag("--local-ranks-filter", "0,2", ("show only these ranks of a host",)),
    ),
    "schedulers": (
        Flag("--slurm", "", ("write the batch script for this job instead",)),
        Flag("--kubernetes", "[=KIND]", ("write its manifest: pytorchjob (default) or jobset",)),
        Flag("--image", "IMAGE", ("the manifest's container image",)),
        Flag("--name", "NAME", ("the job's name there",)),
        Flag("--namespace", "NAME", ("the manifest's namespace",)),
        Flag("--time", "LIMIT", ("the batch job's time limit",)),
        Flag("--partition", "NAME", ("its partition",)),
        Flag("--gpus-per-node", "N", ("GPUs to ask the scheduler for. default: as many as workers",)),
        Flag("--sbatch", "OPTION", ("any other line for the batch script, like --mem=64G",), repeated=True),
        Flag("--output", "FILE", ("where to write script or manifest. default: stdout",)),
        Flag("--submit", "", ("hand the batch script to sbatch at once",)),
    ),
    "taken from other launchers, with nothing to set here": (
        Flag("--standalone", "", ("one host: what is run without --nnodes anyway",)),
        Flag("--monitor-interval", "SECONDS", ("a worker's end is seen at once",)),
        Flag("--start-method", "NAME", ("workers are always fresh processes",)),
        Flag("--role", "NAME", ("all workers are of one role",)),
    ),
}
_FLAGS = tuple(flag for group in _GROUPS.values() for flag in group)
FLAGS = tuple(flag.name for flag in _FLAGS)
_ALSO = {
    "--module": "-m",
    "-h": "--help",
    "-H": "--hostfile",
    "-i": "--include",
    "-e": "--exclude",
    "-r": "--redirects",
    "-t": "--tee",
    "--no-local-rank": "--use-env",
    "--num-accelerators": "--num-gpus",
    "--enable-each-rank-log": "--log-dir",
}
_BY_NAME = {flag.name: flag for flag in _FLAGS}
# Other launchers' names for what has another one here.
_HERE = {
    "--num-processes": "--nproc-per-node",
    "--num-proc": "--nproc-per-node",
    "--nprocs": "--nproc-per-node",
    "--devices": "--nproc-per-node N, or --device 0,3",
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--gpu-ids": "--device",
    "--min-elastic-nodes": "--nnodes LEAST:MOST",
    "--max-elastic-nodes": "--nnodes LEAST:MOST",
    "--launcher-args": "--ssh",
}
_NOT_HERE = {
    "--run-path": "give the path as the script",
    "--launcher": "--hostfile starts over ssh, --slurm writes a batch script, and mpirun starts workers itself",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are always handled",
    "--event-log-handler": "there are no event logs",
    "--numa-binding": "bind with numactl or the scheduler",
    "--virtual-local-rank": "--device chooses GPUs",
    "--duplicate-stdout-filters": "filter the files under --log-dir",
    "--duplicate-stderr-filters": "filter the files under --log-dir",
    "--multi-gpu": "several workers need no flag",
    "--mixed-precision": "it is the training script's choice",
    "--autotuning": "DeepSpeed's own",
    "--elastic-training": "give --nnodes LEAST:MOST",
    "--deepspeed-config": "it belongs to the script: put it after the script's name",
    "--deepspeed": "it belongs to the script: put it after the script's name",
}


def find(spelling: str) -> Flag:
    """The flag of this spelling: dashes and underscores are the same.

    Raises:
        UsageError: there is none; names what was probably meant.
    """
    name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
    flag = _BY_NAME.get(_ALSO.get(name, name))
    if flag is not None:
        return flag
    if name in _HERE:
        raise UsageError(f"unknown flag {spelling}. It is called {_HERE[name]} here.")
    if name in _NOT_HERE:
        raise UsageError(f"{spelling} is another launcher's flag, and not here: {_NOT_HERE[name]}.")
    near = closest(name, [*(flag.name for flag in _FLAGS if flag.name.startswith("--")), *_HERE])
    if near is not None:
        raise UsageError(f"unknown flag {spelling}. Did you mean {_HERE.get(near, near)}?")
    raise UsageError(
        f"unknown flag {spelling}. `photinus run --help` lists the flags; the script's own stand after its name."
    )


def _help() -> str:
    lines = [
        "usage: photinus run [flags] script.py [arguments of the script]",
        "       photinus run [flags] -m module [arguments of the module]",
        "",
        "Starts the script once per device, each process with its rank and world size.",
        "When one fails, says which and of what, and starts all anew from the last",
        "checkpoint.",
        "",
        "examples:",
        "  photinus run train.py                       all GPUs, or all cores",
        "  photinus run --nproc-per-node 2 train.py --epochs 3",
        "  photinus run --nproc-per-node 4 --cpu -m project.train --lr 0.1",
        "  photinus run --nnodes 2 --master-addr node1 train.py         on both hosts",
        "  photinus run --hostfile hosts --include a:0,1@b train.py     from one of them",
        "",
        "flags (dashes or underscores, --flag value or --flag=value):",
    ]
    for group, flags in _GROUPS.items():
        lines += ["", f" {group}"]
        for flag in flags:
            head = f"  {flag.name} {flag.value}".rstrip().replace(" [=", "[=")
            # A head wider than its column stands on a line of its own.
            texts = flag.meaning if len(head) < 21 else ("", *flag.meaning)
            lines.extend(f"{head if number == 0 else '':<22}{text}".rstrip() for number, text in enumerate(texts))
    lines += [
        "",
        "exit code: 0 when all workers ended well; the first cause's own otherwise",
        "(128 + signal for a killed worker); 130 after Ctrl-C, 143 after SIGTERM; 2 for",
        "wrong use.",
    ]
    return "\n".join(lines)


HELP = _help()
