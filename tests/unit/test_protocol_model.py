"""The models of the shared-memory protocol hold, and each of their mutations is rejected (native/model/README.md)."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.fork_server import REPOSITORY

CHECK: dict[str, Any] = runpy.run_path(str(REPOSITORY / "native" / "model" / "check.py"), run_name="check")
HOLDS = CHECK["Verdict"].HOLDS

pytestmark = pytest.mark.slow


def _cases(mutated: bool) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in CHECK["CASES"] if (case.expect is not HOLDS) == mutated]


def _search(case: Any) -> None:
    if lack := CHECK["missing_tool"]():
        pytest.skip(lack)
    result = CHECK["run"](case)
    assert result.verdict is case.expect, result.output


@pytest.mark.parametrize("case", _cases(mutated=False))
def test_the_protocol_keeps_its_promises_in_every_interleaving(case: Any) -> None:
    _search(case)


@pytest.mark.parametrize("case", _cases(mutated=True))
def test_a_protocol_with_a_rule_broken_is_rejected(case: Any) -> None:
    _search(case)
