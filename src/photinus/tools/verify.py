"""The command `photinus verify`: do two runs have the same bits, and if not, from which step on and where?"""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Sequence

from ..cli.parser import Parser
from ..errors import UsageError
from ..runlog.comparison import verdict
from ..runlog.run import Run, run_folder
from ..runlog.units import plural

_ABOUT = """\
Compare two runs bit by bit: digests of parameters and optimizer states, losses,
learning rates and metrics. Says the first step at which they differ, and what
differs there. The runs may have had another number of processes.

RUN is the run's folder, or a folder with runs: then the newest is taken."""
_MORE = """\
example:
  photinus verify runs/two-processes runs/four-processes

exit code: 0 the same; 1 different; 2 not comparable (other data, seed, batch
size, or no step that both recorded), or wrong use."""


def parser() -> Parser:
    """The command line."""
    parser = Parser("verify", "RUN RUN", about=_ABOUT, more=_MORE)
    parser.add("runs", SUPPRESS, metavar="RUN", nargs="*")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints the answer, and returns the exit code."""
    options = parser().parse(arguments)
    if len(options.runs) != 2:
        raise UsageError(f"photinus verify: {plural(len(options.runs), 'run')} given, and two are needed.")
    first, second = (run_folder("verify", name) for name in options.runs)
    if first.resolve() == second.resolve():
        raise UsageError(f"photinus verify: {first} is given twice.")
    runs = [Run(first), Run(second)]
    for run in runs:
        run.refresh()
    code, lines = verdict(*runs)
    print(*lines, sep="\n")
    return code
