"""GPUs: what they are, whether copies to the host work, and which of them reach each other's memory."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from .finding import Finding, assess
from .software import ask_child

_SECTION = "GPUs"
_SHOWN = 8  # pairs
_ASK_LINKS = """
import json, torch
gpus = range(torch.cuda.device_count())
for i in gpus:  # a sick driver fails or hangs here
    torch.ones(1 << 20, device=f"cuda:{i}").cpu()
print(json.dumps({"peers": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus]}))
"""


def look_at_gpus(torch: dict[str, Any] | None, timeout_s: float) -> list[Finding]:
    """Return all findings of GPUs; one where there are none. `torch`: what `ask_torch` found."""
    if torch is None or not torch["gpus"]:
        return [_none(torch, timeout_s)]
    links, error = ask_child(["-c", _ASK_LINKS], timeout_s)
    found = [
        assess(_SECTION, f"GPU {index}", f"{gpu['name']}, {gpu['bytes'] / (1 << 30):.0f} GiB", facts=gpu)
        for index, gpu in enumerate(torch["gpus"])
    ]
    if torch["hip"]:
        advice = "Backend photinus takes CPU tensors there; for tensors on GPUs use nccl, which is RCCL."
        found.append(assess(_SECTION, "ROCm", f"these are AMD's: torch is for ROCm {torch['hip']}", note=advice))
    if links is None:
        advice = "GPUs that copy nothing train nothing: look at nvidia-smi, and dmesg for Xid."
        found.append(assess(_SECTION, "links", f"copies to and from the host do not work: {error}", bad=advice))
    elif len(torch["gpus"]) > 1:
        found.append(_links(links["peers"]))
    return found


def _none(torch: dict[str, Any] | None, timeout_s: float) -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding(_SECTION, "GPUs", "absent", "no NVIDIA driver here; models train on the processors")
    if not _listed_by_the_driver(timeout_s).strip().startswith("GPU"):
        return Finding(_SECTION, "GPUs", "absent", "the driver is here, but shows no GPU")
    what = "torch sees none"
    advice = "Look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this torch (nvidia-smi)."
    if torch and not torch["built_for_cuda"]:
        what, advice = "this torch is built without CUDA", "Install a torch built for CUDA, as pytorch.org says."
        if torch["hip"]:
            what = f"this torch is built for ROCm {torch['hip']}, AMD's"
    return assess(_SECTION, "GPUs", f"the driver shows GPUs, but {what}", bad=advice)


def _listed_by_the_driver(timeout_s: float) -> str:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _links(peers: list[list[bool]]) -> Finding:
    pairs = [(i, j) for i in range(len(peers)) for j in range(i + 1, len(peers))]
    apart = [f"{i}-{j}" for i, j in pairs if not (peers[i][j] and peers[j][i])]
    if not apart:
        return assess(_SECTION, "links", "every GPU reaches every other's memory", facts={"peers": peers})
    advice = "GPUs exchange through host memory there; NCCL is often slow so, and backend photinus is meant for that: "
    advice += "`photinus bench --device cuda` measures both, and the faster one is taken from then on."
    value = f"no peer access between {', '.join(apart[:_SHOWN])}" + " ..." * (len(apart) > _SHOWN)
    return assess(_SECTION, "links", value, note=advice, facts={"peers": peers})
