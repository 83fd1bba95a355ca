"""What `parallel` and `trainer` use of a process group if it offers it, the backend's group does offer."""

from __future__ import annotations

import re

from photinus.backend.engine_reductions import ThroughEngine
from tests.fork_server import REPOSITORY


def test_each_attribute_that_is_asked_of_a_group_exists() -> None:
    asked = {
        name
        for room in ("parallel", "trainer")
        for path in (REPOSITORY / "src" / "photinus" / room).rglob("*.py")
        for name in re.findall(r'getattr\([\w.]*(?:group|WORLD), "(\w+)", ', path.read_text())
    }
    assert {"communicator", "wait_for_callbacks", "watch_updates"} <= asked
    assert {name for name in asked if not hasattr(ThroughEngine, name)} == set()
