"""What a stage of `make gpu` tells of its checks: a line of JSON each, on standard output and in GPU_RESULTS."""

from __future__ import annotations

import json
import os

__all__ = ["tell"]


def tell(check: str, outcome: str, *, figure: str = "", reason: str = "", seconds: float = 0.0) -> None:
    """A check's outcome: pass, miss or skip; tools/gpu.py makes the summary of these."""
    facts = {"stage": os.environ.get("GPU_STAGE", "bench"), "check": check, "outcome": outcome}
    line = json.dumps({**facts, "figure": figure, "reason": reason, "seconds": round(seconds, 1)})
    print(line, flush=True)
    if "GPU_RESULTS" in os.environ:
        with open(os.environ["GPU_RESULTS"], "a", encoding="utf-8") as file:
            file.write(line + "\n")
