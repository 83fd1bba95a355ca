"""Python, Photinus, torch and its backends. What may fail or hang is asked in a child process."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ...errors import LaunchError
from ...runlog.units import bandwidth
from ...version import OLDEST, __version__, is_too_old
from .finding import LATE, Finding, assess
from .plan import Plan
from .rounds import measure

_SECTION = "Software"

_ASK_TORCH = """
import json, torch, torch.distributed as dist
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
facts = {
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "built_for_cuda":
    torch.backends.cuda.is_built(), "distributed": dist.is_available(),
    "available": {n: bool(getattr(dist, f"is_{n}_available", lambda: False)()) for n in ("gloo", "nccl", "mpi", "ucc")},
    "photinus": "photinus" in dist.Backend.backend_list if dist.is_available() else False,
    "gpus": [{"name": p.name, "bytes": p.total_memory, "uuid": str(getattr(p, "uuid", ""))}
             for p in map(torch.cuda.get_device_properties, range(count))],
}
print(json.dumps(facts))
"""

Answer = tuple[dict[str, Any] | None, str]
"""Facts, or None and why there are none."""


def ask_child(words: Sequence[str], timeout_s: float) -> Answer:
    """Return the JSON object that a program of this Python prints last; or None, and why not."""
    try:
        process = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, LATE.format(timeout_s)
    for line in reversed(process.stdout.splitlines()):  # libraries may print too, before and after
        with contextlib.suppress(ValueError):
            if process.returncode == 0 and isinstance(answer := json.loads(line), dict):
                return answer, ""
    last_line = (process.stderr.strip() or process.stdout.strip() or "nothing").splitlines()[-1]
    return None, last_line if process.returncode else f"no answer, but: {last_line}"


def ask_torch(timeout_s: float) -> Answer:
    """Ask torch, in a child process, for its versions, backends and GPUs."""
    return ask_child(["-c", _ASK_TORCH], timeout_s)


def ask_engine(timeout_s: float, *words: str) -> Answer:
    """Ask the engine what it is here, or what it answers to `words` (see photinus.engine)."""
    return ask_child(["-m", "photinus.engine", *words], timeout_s)


def look_at_software(torch: Answer, engine: Answer) -> list[Finding]:
    """Return the findings of Python, Photinus, its engine and torch."""
    python = f"{platform.python_version()} ({sys.executable}), Photinus {__version__}"
    return [assess(_SECTION, "Python", python), _engine(*engine), _torch(*torch)]


def _engine(facts: dict[str, Any] | None, error: str) -> Finding:
    if facts is None:
        advice = "The native module is missing, or was built for another Python or CPU: "
        advice += "install Photinus again in this environment."
        return assess(_SECTION, "engine", error, bad=advice)
    value = f"adds with {facts['instruction_set']}; {facts['usable_cores']} usable cores"
    advice = "Neither AVX2 nor AVX-512: a processor from before 2013, or PHOTINUS_INSTRUCTION_SET is set."
    is_old = facts["instruction_set"] == "baseline" and platform.machine() in ("x86_64", "AMD64")
    return assess(_SECTION, "engine", value, note=advice if is_old else "", facts=facts)


def _torch(facts: dict[str, Any] | None, error: str) -> Finding:
    if facts is None:
        advice = "Install PyTorch as its site says for this machine (pytorch.org). Without it, photinus.engine works."
        return assess(_SECTION, "torch", error, bad=advice)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    value = f"{facts['version']} ({build})"
    bad = note = ""
    if is_too_old(facts["version"]):
        bad = f"Photinus needs torch {'.'.join(map(str, OLDEST))} or newer."
    elif not facts["distributed"]:
        bad = "This build of torch has no torch.distributed; install one that has it."
    elif facts["photinus"]:
        value += "; backend photinus registers by itself"
    else:
        value += "; backend photinus is not registered"
        note = "import torch did not register backend photinus: TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches that off; "
        note += "`import photinus` before init_process_group does it too."
    return assess(_SECTION, "torch", value, bad=bad, note=note, facts=facts)


_BACKENDS = "Backends (two processes, all_reduce tried)"
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 16 << 20
_OWN_WORDS = "The message is the backend's own."
_ADVICE = {
    "photinus": "See `engine` and `memfd` above; the message says what was missing.",
    "gloo": "Often the network: loopback down, or GLOO_SOCKET_IFNAME names an interface that is not there.",
    "nccl": "NCCL_DEBUG=INFO makes it say more; a driver older than torch's CUDA is the usual cause.",
}


def look_at_backends(torch: dict[str, Any] | None, timeout_s: float) -> list[Finding]:
    """Try photinus, gloo, nccl and ucc, where this torch has them."""
    if torch is None or not torch["distributed"]:
        return []
    gpus, has = len(torch["gpus"]), torch["available"]
    found = try_backends(["photinus", "gloo", *(["ucc"] if has["ucc"] else [])], timeout_s)
    if has["nccl"] and gpus:  # in a job of its own: nccl takes one rank per GPU
        found += try_backends(["nccl"], timeout_s, ranks=min(2, gpus))
    elif has["nccl"]:
        found.append(Finding(_BACKENDS, "nccl", "absent", "there is no GPU to try it on"))
    if has["mpi"]:
        found.append(assess(_BACKENDS, "mpi", "not tried", note="Only mpirun can start it: mpirun -n 2 ..."))
    why = {"nccl": "", "mpi": " (as all released builds are)", "ucc": ""}
    missing = [Finding(_BACKENDS, n, "absent", f"this torch is built without it{why[n]}") for n in why if not has[n]]
    return found + missing


def try_backends(names: Sequence[str], timeout_s: float, ranks: int = 2) -> list[Finding]:
    """Try backends in the same ranks, and return a finding for each."""
    calls = (("all_reduce", _SMALL_BYTES), ("all_reduce", _LARGE_BYTES))
    try:
        measured, absent = measure(Plan(tuple(names), calls, seconds=0.1, timeout_s=timeout_s), ranks)
    except LaunchError as error:  # no rank was started: the other findings are worth as much
        measured, absent = [], dict.fromkeys(names, str(error))
    found = []
    for name in names:
        if name in absent:
            is_late = absent[name] == LATE.format(timeout_s)
            advice = "TORCH_DISTRIBUTED_DEBUG=DETAIL makes it say more." if is_late else _ADVICE.get(name, _OWN_WORDS)
            found.append(assess(_BACKENDS, name, absent[name], bad=advice))
            continue
        small_s, large_s = (seconds[name] for seconds in measured)
        value = f"works: 4 KiB in {small_s * 1e6:.0f} µs, 16 MiB at {bandwidth(_LARGE_BYTES / large_s)}"
        facts = {"small_s": small_s, "large_s": large_s, "large_bytes": _LARGE_BYTES}
        found.append(assess(_BACKENDS, name, value, facts=facts))
    return found
