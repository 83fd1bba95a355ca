"""The parser of all commands: argparse, with errors that show what to type instead."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from ..errors import UsageError
from ..words import closest, hint

# Flags that were typed: the first spelling -> the one that was used, and the text behind it.
Spellings: TypeAlias = Mapping[str, tuple[str, str]]


class Parser(argparse.ArgumentParser):
    """The parser of one command. In flags, dashes and underscores are the same.

    Args:
        command: its name, like "bench".
        usage: what follows the name in help, in one way or several.
        about: what it does, and `more`: examples, exit codes; both wrapped by hand.
        passes_on: the flags end at the first word that is none (or behind the value of `-m`), and what follows is not
            looked at.
        renamed: other programs' flags, and what they are called here.
        absent: other programs' flags that have nothing to do here, and what to do instead.
        exclusive: each a flag, and those that cannot be given with it.

    Attributes:
        flags: each spelling, with dashes, and argparse's action for it.
    """

    def __init__(
        self,
        command: str,
        *usage: str,
        about: str,
        more: str = "",
        passes_on: bool = False,
        renamed: Mapping[str, str] | None = None,
        absent: Mapping[str, str] | None = None,
        exclusive: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(
            prog=f"photinus {command}",
            usage="\n       ".join(f"%(prog)s {way}" for way in usage),
            description=about,
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.flags: dict[str, argparse.Action] = {}
        self._passes_on = passes_on
        self._renamed = renamed or {}
        self._absent = absent or {}
        self._exclusive = exclusive
        self._only_with: dict[str, Sequence[str]] = {}
        self._sections: dict[str, Any] = {}
        self._repeated: set[str] = set()
        self.add("--help -h", "show this text", action="help")

    def add(
        self,
        usage: str,
        help: str,
        type: Callable[[str], Any] = str,
        *,
        section: str = "flags",
        one_of: Sequence[str] = (),
        some_of: Sequence[str] = (),
        only_with: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Declare a flag, or a word.

        Args:
            usage: the spellings of a flag, of which help shows the first, and what stands for its value (nothing: a
                switch); or the name of a word.
            type: raises ArgumentTypeError, saying what is needed.
            section: of help.
            one_of: what the value may be; some_of: what a list with commas may hold (the value is a tuple).
            only_with: flags of which one must be given too.
            options: argparse's.
        """
        if one_of or some_of:
            type = _choice(one_of) if one_of else _choices(some_of)
        names = [word for word in usage.split() if word.startswith("-")]
        name, metavar = [*names, usage][0], usage.split()[-1]
        if not names:
            self.add_argument(usage, help=help, type=type, **options)
            return
        if metavar != names[-1]:
            options |= {"metavar": metavar, "type": type}
        else:
            options.setdefault("action", "store_true")
        if section not in self._sections:
            self._sections[section] = self.add_argument_group(section)
        if options.get("action") == "append":
            self._repeated.add(name)
        self._only_with[name] = only_with
        self.flags.update(dict.fromkeys(names, self._sections[section].add_argument(name, help=help, **options)))

    def parse(
        self,
        typed: Sequence[str],
        otherwise: Spellings | None = None,
        unless: Mapping[str, Collection[str]] | None = None,
    ) -> argparse.Namespace:
        """Return the values by their names, and with them `spellings` and `rest`, what was not looked at.

        `--help` prints the help and raises SystemExit.

        Args:
            typed: the words of the command line.
            otherwise: flags from variables: each with the variable's name and text. A typed flag wins.
            unless: for a flag of `otherwise`, other flags that win over it, too.

        Raises:
            UsageError: the words cannot be carried out; says why and what to type instead.
        """
        rest, words = list(typed), list[str]()
        spellings: dict[str, tuple[str, str]] = {}
        try:
            flags = list(self._split(rest, spellings, words))
            replaced = {name for name in otherwise or {} if spellings.keys() & {name, *(unless or {}).get(name, ())}}
            for name, (source, text) in (otherwise or {}).items():
                if name not in replaced:
                    spellings[name] = (source, text)
                    flags.append(name if self.flags[name].nargs == 0 else f"{name}={text}")
            values = super().parse_args([*flags, *words])
        except argparse.ArgumentError as error:
            action = self.flags.get(error.argument_name or "")
            what = shown(spellings, action.option_strings[0]) if action is not None else self.prog
            raise UsageError(f"{what}: {error.message}") from None
        refuse_exclusive(spellings, self._exclusive)
        for name in spellings:
            needed = self._only_with[name]
            if needed and not any(flag in spellings for flag in needed):
                raise UsageError(f"{shown(spellings, name)} has an effect only with {' or '.join(needed)}.")
        values.spellings, values.rest = spellings, tuple(rest)
        return values

    def error(self, message: str) -> NoReturn:
        """Raise what argparse finds beside wrong values: too few arguments, or too many."""
        raise UsageError(f"{self.prog}: {message}. See `{self.prog} --help`.")

    def _split(self, rest: list[str], spellings: dict[str, tuple[str, str]], words: list[str]) -> Iterator[str]:
        """Take flags and words between them out of `rest`; yield flags as --name=value, which argparse accepts."""
        while rest:
            if not rest[0].startswith("-") or rest[0] == "-":
                if self._passes_on:
                    return
                words.append(rest.pop(0))
                continue
            word = rest.pop(0)
            if word == "--":
                continue
            spelling, equals, text = word.partition("=")
            action = self._find(spelling)
            name = action.option_strings[0]
            if action.nargs == 0 and equals:
                raise UsageError(f"{spelling} takes no value, but got {text!r}.")
            if action.nargs is None and not equals:
                # A flag where the value should be; but -1 is a value (and a wrong one).
                is_flag = rest and rest[0].startswith("-") and rest[0] != "-" and not rest[0][1].isdigit()
                if not rest or is_flag:
                    raise UsageError(f"{spelling} needs a value: {action.metavar}.")
                equals, text = "=", rest.pop(0)
            if name in spellings and spellings[name][1] != text and name not in self._repeated:
                raise UsageError(f"{name} is given twice: {spellings[name][1]} and {text}.")
            spellings[name] = (spelling, text)
            yield f"{name}={text}" if name.startswith("--") and equals else name
            if not name.startswith("--") and equals:
                yield text
            if name == "-m" and self._passes_on:
                return

    def _find(self, spelling: str) -> argparse.Action:
        name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
        if name in self.flags:
            return self.flags[name]
        if name in self._renamed:
            raise UsageError(f"unknown flag {spelling}. Its name here is {self._renamed[name]}.")
        if name in self._absent:
            raise UsageError(f"{spelling} is a flag of a different launcher: {self._absent[name]}.")
        near = closest(name, [*self.flags, *self._renamed])
        if near is not None:
            near = self._renamed.get(near) or self.flags[near].option_strings[0]
            raise UsageError(f"unknown flag {spelling}. Did you mean {near}?")
        own = "; put flags of the script after its name" if self._passes_on else ""
        raise UsageError(f"unknown flag {spelling}. `{self.prog} --help` lists the flags{own}.")


def shown(spellings: Spellings, flag: str) -> str:
    """Return a flag as it was typed."""
    return " ".join(filter(None, spellings[flag]))


def contradiction(spellings: Spellings, first: str, second: str, why: str = "remove one of them.") -> UsageError:
    """Return the error for two flags that cannot both be meant."""
    return UsageError(f"{shown(spellings, first)} and {shown(spellings, second)} are mutually exclusive: {why}")


def refuse_exclusive(spellings: Spellings, exclusive: Iterable[Sequence[str]]) -> None:
    """Raise UsageError if the first flag of a row is given, and one of the others too."""
    for first, *others in exclusive:
        for other in others:
            if first in spellings and other in spellings:
                raise contradiction(spellings, first, other)


def _choice(names: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            needed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            raise argparse.ArgumentTypeError(f"needs {needed}.{hint(text, names)}")
        return text

    return read


def _choices(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(text.replace(",", " ").split()))
        for word in words:
            if word not in names:
                raise argparse.ArgumentTypeError(f"{word} is not one of {', '.join(names)}.{hint(word, names)}")
        if not words:
            raise argparse.ArgumentTypeError(f"needs one or more of {', '.join(names)}.")
        return words

    return read
