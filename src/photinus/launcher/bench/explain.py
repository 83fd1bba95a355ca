"""`photinus bench --explain`: how the engine runs calls of each size, why, and for how long by its model."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from ...errors import LaunchError
from ..doctor.software import ask_engine
from .options import DTYPES, size_name

_PARTS = "all_to_all"
_BY_PARTS = "small: through flat slots; from arenas where a sender's tensors lie there; chunk by chunk else"
_WHOLE = ("reduce_scatter", "all_gather")


def print_explanation(options: Namespace, ranks: int) -> None:
    """Prints a table, or JSON; `ranks`: on this host, where no hosts are given. LaunchError: no engine works here."""
    hosts = options.hosts or (ranks,)
    explained = [_explain(options, hosts, operation) for operation in options.operations]
    if options.as_json:
        print(json.dumps({"hosts": hosts, "unit": "seconds by the model", "operations": explained}, indent=1))
        return
    on = f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    print(f"{sum(hosts)} ranks on {on}, {options.dtype} in arenas; times by the model of docs/scale.md\n")
    for each in explained:
        if each["levels"]:
            print(f"{each['operation']}: {each['levels']}")
        for call in each["calls"]:
            what = call["algorithm"] + (f" over {call['levels']}" if call["levels"] else "")
            time = f"{call['seconds'] * 1e6:.4g} µs"
            size = size_name(call["bytes"])
            print(f"{size:>9}  {each['operation']:<14} {time:>12}  {what:<16} {call['kernels']}  {call['reason']}")


def _explain(options: Namespace, hosts: tuple[int, ...], operation: str) -> dict[str, Any]:
    item = DTYPES[options.dtype]
    parts = sum(hosts) if operation in _WHOLE else 1
    sizes = [max(1, size // item // parts) for size in sorted(options.sizes_bytes)]
    if operation == _PARTS:
        return {"operation": operation, "levels": _BY_PARTS, "calls": []}
    speeds = (options.latency_us * 1e-6, options.rate_gbit / 8e-9)
    asked = {"counts": hosts, "operation": operation, "sizes_elems": sizes, "dtype": options.dtype, "speeds": speeds}
    answer, error = ask_engine(options.timeout_s, json.dumps(asked))
    if answer is None:
        raise LaunchError(f"the engine does not work here: {error}")
    levels, calls = answer["explained"]
    calls = [{"bytes": elems * item * parts, **call} for elems, call in zip(sizes, calls, strict=True)]
    return {"operation": operation, "levels": levels, "calls": calls}
