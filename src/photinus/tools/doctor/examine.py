"""`photinus doctor`: looks at everything, shows a table, and says with its exit code whether all is well."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...cli.flag_values import port, positive_seconds
from ...cli.parser import Parser
from ...errors import UsageError
from ...words import hint
from .finding import report, terminal
from .gpus import look_at_gpus
from .host import look_at_host
from .model import batch_value, examine_model
from .model_rank import Trial
from .software import ask_engine, ask_torch, look_at_backends, look_at_software

_TIMEOUT_S = 120.0
_BACKENDS = ("photinus", "gloo", "nccl")

_ABOUT = """\
Check this machine and show what works: processors, memory, limits and name, the
engine, torch, GPUs, and every backend of torch.distributed, by running each in
two processes.

With --hosts or --hostfile, check several hosts over ssh: versions, clocks, and
whether every host reaches every other, with latency and bandwidth.

With --model, train a model for some seconds with 1, 2, 4 and 8 ranks, and show
if more devices or hosts pay, what limits the speed, and what would help."""
_MORE = """\
examples:
  photinus doctor
  photinus doctor --json | python -m json.tool
  photinus doctor --hosts node1,node2
  photinus doctor --model train.py:make_model --batch 64,3,32,32
  photinus doctor --model train.py:make_model --batch make_batch,64

--model names a function that returns a torch.nn.Module, or a module and its
optimizer (default: AdamW). --batch is the shape of a float32 input, with the
samples of a step first; or a function of the same file, which gets a number of
samples and returns the model's inputs (a tuple, or a dict of named ones), and
the number of samples of a step. The loss is the model's own (`.loss`), or the
mean square of its output.

exit code: 0 when all is well; 1 when something needs attention; 2 for wrong
use."""


def parser() -> Parser:
    """Return the parser of the command line."""
    several = "--hosts a,b,c [--json] [--ssh COMMAND] [--ssh-port PORT]"
    parser = Parser(
        "doctor",
        "[--json] [--timeout SECONDS]",
        several,
        "--model FILE.py:FUNCTION --batch SHAPE [--backend NAME]",
        about=_ABOUT,
        more=_MORE,
        exclusive=[("--hosts", "--hostfile", "--model"), ("--hostfile", "--model")],
    )
    parser.add("--json", "print the findings as JSON")
    parser.add("--timeout SECONDS", "timeout of each check. default: 120", positive_seconds, default=_TIMEOUT_S)
    parser.add("--hosts a,b,c", "hosts to check (root@a: as a different user)")
    parser.add("--hostfile FILE", "file with the hosts, as for `photinus run`")
    reached = ("--hosts", "--hostfile")
    parser.add("--ssh COMMAND", "ssh command. default: ssh", default="ssh", only_with=reached)
    parser.add("--ssh-port PORT", "port of the ssh servers", port, only_with=reached)
    parser.add("--model FILE.py:FUNCTION", "function that returns the model to measure")
    parser.add("--batch SHAPE", "shape of the input, or FUNCTION,SAMPLES", batch_value, only_with=("--model",))
    parser.add(
        "--backend NAME", "backend. default: photinus", one_of=_BACKENDS, only_with=("--model",), default=_BACKENDS[0]
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Examine this machine, or several hosts. Return 0 if all is well, else 1. Raise UsageError."""
    options = parser().parse(arguments)
    if options.hosts is not None or options.hostfile is not None:
        return _examine_hosts(options)
    if options.model is not None:
        return _examine_model(options)
    torch, error = ask_torch(options.timeout)
    findings = look_at_host() + look_at_software((torch, error), ask_engine(options.timeout))
    findings += look_at_gpus(torch, options.timeout) + look_at_backends(torch, options.timeout)
    return report(findings, as_json=options.json)


def _examine_model(options: Namespace) -> int:
    place, colon, function = options.model.rpartition(":")
    if not (place and colon and function.isidentifier()):
        raise UsageError(f"photinus doctor --model {options.model}: needs FILE.py:FUNCTION, as train.py:make_model.")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"photinus doctor --model {options.model}: there is no file {place}.")
    if place.endswith(".py"):
        batch = options.batch[0] if options.batch is not None else None
        _check_names(Path(place), [function, *([batch] if isinstance(batch, str) else [])])
    if options.batch is None:
        raise UsageError("photinus doctor --model needs --batch too, as --batch 64,3,32,32 or --batch make_batch,64.")
    batch, samples = options.batch
    trial = Trial(options.model, batch, samples, backend=options.backend, timeout_s=options.timeout)
    return examine_model(trial, as_json=options.json)


def _check_names(path: Path, functions: Sequence[str]) -> None:
    """Refuses a function that a file does not have, before ranks start. The file's text is read, and not run."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # a rank shows what is wrong with it
        return
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for function in functions:
        if function not in names and "*" not in names:
            raise UsageError(f"photinus doctor: {path} has no function {function}.{hint(function, names)}")


def _examine_hosts(options: Namespace) -> int:
    from ...run.ssh.hostfile import parse_hostfile, read_hostfile
    from .hosts import look_at_hosts, print_pairs

    if options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    else:
        hosts = parse_hostfile("\n".join(dict.fromkeys(options.hosts.replace(",", " ").split())), "--hosts")
    findings, pairs = look_at_hosts(hosts, options.ssh, options.ssh_port, options.timeout)
    if pairs and not options.json:
        print_pairs([host.name for host in hosts], pairs, terminal().width)
    return report(findings, as_json=options.json, pairs=[asdict(pair) for pair in pairs])
