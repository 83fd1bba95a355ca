"""`photinus doctor`: looks at everything, shows a table, and says with its exit code whether all is well."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence

from ..usage import UsageError, closest
from .backends import look_at_backends
from .finding import Finding, as_json, exit_code, table
from .host import look_at_host
from .network import look_at_network
from .software import ask_engine, ask_torch, look_at_software

__all__ = ["FLAGS", "HELP", "main"]

FLAGS = ("--json", "--timeout", "--help")

_WIDEST = 100

HELP = """\
usage: photinus doctor [--json] [--timeout SECONDS]

Looks at this machine and says what works: processors, memory and limits, the
engine, torch and GPUs, network interfaces, and every backend of
torch.distributed, really tried in two processes.

flags:
  --json             the findings as JSON, for programs
  --timeout SECONDS  for each thing that is tried. default: 60
  --help             this text

examples:
  photinus doctor
  photinus doctor --json | python -m json.tool

exit code: 0 when all is well; 1 when something needs attention; 2 for wrong
use."""


def main(arguments: Sequence[str]) -> int:
    """Examines this machine; returns 0 when all is well, else 1.

    Raises:
        UsageError: words that are no flags of this command.
    """
    as_text, timeout_s = _flags(list(arguments))
    if timeout_s is None:
        print(HELP)
        return 0
    findings: list[Finding] = [*look_at_host(), *look_at_network()]
    torch = ask_torch(timeout_s)
    findings += look_at_software(torch, ask_engine(timeout_s), timeout_s)
    findings += look_at_backends(torch.facts, timeout_s)
    # Sections in the order of their first appearance, each together.
    order = {section: index for index, section in enumerate(dict.fromkeys(each.section for each in findings))}
    findings.sort(key=lambda each: order[each.section])
    if as_text:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        print(table(findings, width=min(_WIDEST, shutil.get_terminal_size().columns), colour=colour))
    else:
        print(json.dumps(as_json(findings), indent=1))
    return exit_code(findings)


def _flags(words: list[str]) -> tuple[bool, float | None]:
    """Whether text is wanted, and the deadline; None for help."""
    as_text, timeout_s = True, 60.0
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name in ("--help", "-h"):
            return True, None
        if name == "--json" and not equals:
            as_text = False
        elif name == "--timeout":
            timeout_s = _seconds(value if equals else words.pop(0) if words else "")
        else:
            near = closest(name, FLAGS)
            hint = f" Did you mean {near}?" if near else " See `photinus doctor --help`."
            raise UsageError(f"photinus doctor does not know {name}.{hint}")
    return as_text, timeout_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--timeout {text}".rstrip() + ": needs a number of seconds above 0.")
    return seconds
