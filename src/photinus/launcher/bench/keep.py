"""Whether what was measured on GPUs says which backend to train over, and keeping that for those who choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...verdict import Setting, driver_version, keep_verdict
from .options import Options
from .result import Result

__all__ = ["keep_choice"]

_LEAST_BYTES = 1 << 20  # below, it is latency that is compared


def keep_choice(
    options: Options, usable: Sequence[str], results: Sequence[Result], torch: dict[str, Any], best: str, why: str
) -> str:
    """Keeps the verdict, if it is one; a line that says so, or why not. "" where no GPU was measured.

    Args:
        options: of the command line.
        usable: all backends that these ranks could take.
        results: what was measured.
        torch: facts of torch and its GPUs.
        best: the choice, and why.
    """
    if options.device != "cuda":
        return ""
    left_out = [name for name in usable if options.backends is not None and name not in options.backends]
    of_buckets = [each for each in results if each.operation == "all_reduce" and each.size_bytes >= _LEAST_BYTES]
    gpus = tuple(torch["gpus"][rank % len(torch["gpus"])]["uuid"] for rank in range(results[0].ranks))
    reason = ""
    if left_out:
        reason = f"{', '.join(left_out)} was left out"
    elif results[0].operation != "all_reduce" or not of_buckets:
        reason = "it takes an all_reduce of 1 MiB or more to tell"
    elif not all(gpus):
        reason = "torch does not tell these GPUs apart"
    if reason:
        return f'This is not kept for backend "auto": {reason}.'
    try:
        path = keep_verdict(Setting(gpus, driver_version(), torch["version"]), best, why)
    except OSError as error:
        return f'This cannot be kept for backend "auto": {error}.'
    return f'Kept in {path}: on these GPUs, {len(gpus)} ranks with backend "auto" take {best} from now on.'
