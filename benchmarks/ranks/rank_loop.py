"""The loop of `photinus bench`'s ranks, for ranks in environments that do not have Photinus. Needs only Python.

(native/bench/driven.cc speaks the same with those who start it, in C++.)
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[2] / "src/photinus/tools/contestants/rank.py"
_SPEC = importlib.util.spec_from_file_location("contestants_rank", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_RANK = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RANK)

pin, serve = _RANK.pin, _RANK.serve
