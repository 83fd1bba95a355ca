"""What `import photinus` offers: every name is there, says what it does, and stands in the pages."""

from __future__ import annotations

import ast
import builtins
import inspect

import pytest

import photinus
from photinus import errors
from tests.fork_server import REPOSITORY

NAMES = [name for name in photinus.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", NAMES)
def test_each_exported_name_has_a_docstring_and_is_in_the_reference(name: str) -> None:
    value = getattr(photinus, name)
    assert not inspect.ismodule(value), "a module among functions and classes"
    assert (vars(value) if inspect.isclass(value) else {"__doc__": value.__doc__})["__doc__"]
    told = (REPOSITORY / "docs" / "reference" / "api.md").read_text().splitlines()
    assert f"::: photinus.{name}" in told or f" {name} " in str(errors.__doc__)


def test_every_error_can_be_caught_by_its_name() -> None:
    assert {name for name in NAMES if name.endswith("Error")} == set(errors.__all__)


def test_what_is_raised_on_purpose_is_ours_or_a_wrong_argument() -> None:
    # Python's own protocols want the others: indexing, getattr, a module that `-m` does not find, an errno.
    allowed = {"ValueError", "TypeError", "IndexError", "AttributeError", "ImportError", "OSError", "SystemExit"}
    found = {
        f"{path.name}: {call.func.id}"
        for path in (REPOSITORY / "src" / "photinus").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call) and isinstance(call.func, ast.Name)
        if isinstance(getattr(builtins, call.func.id, None), type) and call.func.id not in allowed
    }
    # The system's, with a reason.
    assert found == {"config.py: PermissionError"}
