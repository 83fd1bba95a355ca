"""`photinus again RUN`: starts a run once more as it was started last, from what its config.json says.

The same command in the same folder, with the variables of the environment that were set then. It goes on from the
newest checkpoint, or says that the run is finished. What has changed since is told, not hidden.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..relaunch import Launch, ask_git
from .command_line.parser import Parser
from .command_line.usage import UsageError

_CONFIG = "config.json"
_OF_A_LAUNCHER = ("--local_rank", "--local-rank")
_ABOUT = """\
Starts the run in the folder RUN once more: the command of its last start, in the
same working directory, with the same variables of the environment. It goes on
from the newest checkpoint. What follows RUN is added to the script's arguments:
of an option that is given twice, the last one counts."""
_EXAMPLES = """\
examples:
  photinus again runs/digits
  photinus again runs/digits --epochs 30
  photinus again --dry-run runs/digits"""


def parser() -> Parser:
    """The command line."""
    made = Parser("again", "[--dry-run] RUN [arguments to add]", about=_ABOUT, more=_EXAMPLES, passes_on=True)
    made.add("--dry-run", action="store_true", help="only say what would be started")
    return made


@dataclass(frozen=True)
class Again:
    """How to start a run once more."""

    command: tuple[str, ...]
    folder: Path
    environ: Mapping[str, str]
    notes: tuple[str, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Starts the run that the words after `photinus again` name, in the place of this process: it does not return.

    Only help and a dry run return, with 0.
    """
    values = parser().parse(arguments)
    words = values.rest
    if not words:
        raise UsageError("which run? Usage: photinus again RUN, the folder that holds its config.json.")
    again = plan(Path(words[0]), words[1:])
    for note in again.notes:
        print(f"photinus: note: {note}", file=sys.stderr)
    print(f"photinus: in {again.folder}: {_command_text(again)}", file=sys.stderr, flush=True)
    if not values.dry_run:
        os.chdir(again.folder)
        sys.stdout.flush()
        os.execvpe(again.command[0], again.command, {**os.environ, **again.environ})
    return 0


def plan(run: Path, added: Sequence[str] = ()) -> Again:
    """What starts the run in the folder `run` once more, with `added` after the script's own arguments.

    Raises:
        UsageError: no config.json is there, it does not say enough, or what it names is not there any more.
    """
    config = _read(run)
    try:
        return _plan(run, config, list(added))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{run / _CONFIG} does not say how the run was started ({type(error).__name__}: {error}): start it by hand."
        ) from error


def _plan(run: Path, config: Mapping[str, Any], added: list[str]) -> Again:
    start = config["starts"][-1]
    folder = Path(start["folder"])
    if not folder.is_dir():
        raise UsageError(f"the run was started in {folder}, which is not there any more: start it by hand.")
    _check_place(run, folder, config["options"]["out"])
    launch = None if start.get("launch") is None else Launch.from_fields(start["launch"])
    environ = launch.environ if launch is not None else start.get("environ") or {}
    notes = _changes(start, folder)
    python, *script = start["command"]
    if shutil.which(python) is None:
        notes.append(f"{python} is not there any more; {sys.executable} takes its place")
        python = sys.executable
    if launch is not None:
        arguments = list(launch.arguments)
    else:  # without what a launcher gave to each process
        words = script[2:] if script[0] == "-m" else script[1:]
        arguments = [word for word in words if word.partition("=")[0] not in _OF_A_LAUNCHER]
    arguments = [*_resume(arguments, config["options"]["resume"]), *added]
    hosts = list(dict.fromkeys(start["hosts"]))
    if launch is not None:
        command = [python, "-m", "photinus", "run", *launch.words, *arguments]
    elif start["launcher"] == "none":
        command = [python, *(script[:2] if script[0] == "-m" else script[:1]), *arguments]
    else:
        raise UsageError(
            f"this run had {start['world_size']} processes, by {start['launcher']}: start it the same way once more, "
            f"and it goes on from its newest checkpoint. (What `photinus run` starts can be started again from here.)"
        )
    # With a host file the words, typed in one place, start the workers of all hosts over ssh.
    over_ssh = launch is not None and any(word.partition("=")[0] in ("--hostfile", "-H") for word in launch.words)
    if len(hosts) > 1 and not over_ssh:
        raise UsageError(
            f"the run had {len(hosts)} hosts ({', '.join(hosts)}). Start it on each of them as before; on {hosts[0]}, "
            f"in {folder}: {_command_text(Again(tuple(command), folder, environ))}"
        )
    return Again(tuple(command), folder, environ, tuple(notes))


def _read(run: Path) -> Mapping[str, Any]:
    path = run / _CONFIG
    if not run.is_dir():
        raise UsageError(f"there is no run at {run}: it is {'a file' if run.exists() else 'not there'}.")
    if not path.is_file():
        near = sorted(str(each.parent) for each in run.glob(f"*/{_CONFIG}"))
        raise UsageError(
            f"{run} is no run: it has no {_CONFIG}." + (f" Did you mean {', '.join(near)}?" if near else "")
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds a {type(config).__name__}, but a run's config is an object.")
    return config


def _check_place(run: Path, folder: Path, out: str) -> None:
    """A run that was moved would be begun anew at its old place."""
    if (folder / out).resolve() != run.resolve():
        raise UsageError(
            f"{run} was written to {folder / out}, and has been moved or copied since: the same command would write "
            f"there again. Start it by hand."
        )


def _resume(arguments: list[str], resume: str | None) -> list[str]:
    """The arguments with --resume auto in the place of what they said."""
    if resume == "auto":
        return arguments
    for place, word in enumerate(arguments):
        flag, equals, _ = word.partition("=")
        if flag == "--resume" and equals:
            return [*arguments[:place], "--resume=auto", *arguments[place + 1 :]]
        if flag == "--resume" and place + 1 < len(arguments):
            return [*arguments[:place], "--resume", "auto", *arguments[place + 2 :]]
    raise UsageError(
        f"the script itself says resume={resume!r}, so the same command would not go on where the run stands: start it "
        f'by hand with resume="auto".'
    )


def _changes(start: Mapping[str, Any], folder: Path) -> list[str]:
    """What is not as it was at the last start, as far as that can be seen without starting anything."""
    notes = []
    for package in ("photinus", "torch"):
        before = (start["versions"].get(package) or "").partition("+")[0]
        try:
            now = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        if before and before != now:
            notes.append(f"{package} was {before} and is {now} now")
    git = start.get("git")
    if git is not None:
        script = start["command"][1]
        place = (folder / script).resolve().parent if script != "-m" else folder
        commit = ask_git(place, "rev-parse", "HEAD")
        if commit is not None and commit != git["commit"]:
            notes.append(f"the commit was {git['commit'][:10]} and is {commit[:10]} now")
    return notes


def _command_text(again: Again) -> str:
    changed = [f"{name}={value}" for name, value in again.environ.items() if os.environ.get(name) != value]
    return shlex.join([*(["env", *changed] if changed else []), *again.command])
