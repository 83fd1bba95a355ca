"""What `import photinus` offers: every name is there, says what it does, and stands in the pages."""

from __future__ import annotations

import inspect

import pytest

import photinus
from photinus import errors
from tests.fork_server import REPOSITORY

NAMES = [name for name in photinus.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", NAMES)
def test_each_exported_name_has_a_docstring_and_stands_in_the_pages(name: str) -> None:
    value = getattr(photinus, name)
    assert not inspect.ismodule(value), "a module among functions and classes"
    assert (vars(value) if inspect.isclass(value) else {"__doc__": value.__doc__})["__doc__"]
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    told = "".join(page.read_text() for page in pages)
    assert f"photinus.{name}" in told or f" {name} " in str(errors.__doc__)


def test_every_error_can_be_caught_by_its_name() -> None:
    assert {name for name in NAMES if name.endswith("Error")} == set(errors.__all__)
