"""GPUs: what they are, how they are linked with the host and each other, and how fast copies go."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from ...runlog.units import bandwidth
from .finding import Finding, assess
from .software import ask_child

_SECTION = "GPUs"
_WAYS = {"to the host": "to_host", "back": "to_gpu", "both at once": "both"}
_SHOWN = 8  # pairs


def look_at_gpus(torch: dict[str, Any] | None, timeout_s: float) -> list[Finding]:
    """Return all findings of GPUs; one where there are none. `torch`: what `ask_torch` found."""
    if torch is None or not torch["gpus"]:
        return [_none(torch, timeout_s)]
    links, error = ask_child(["-m", "photinus.tools.doctor.gpu_links"], timeout_s)
    found = []
    for index, gpu in enumerate(torch["gpus"]):
        value, link = f"{gpu['name']}, {gpu['bytes'] / (1 << 30):.0f} GiB", links["gpus"][index] if links else {}
        if link:
            value += "; " + ", ".join(f"{way} {bandwidth(link[name])}" for way, name in _WAYS.items())
        found.append(assess(_SECTION, f"GPU {index}", value, facts={**gpu, **link}))
    if torch["hip"]:
        advice = "Backend photinus takes CPU tensors there; for tensors on GPUs use nccl, which is RCCL."
        found.append(assess(_SECTION, "ROCm", f"these are AMD's: torch is for ROCm {torch['hip']}", note=advice))
    if links is None:
        advice = "GPUs that copy nothing train nothing: look at nvidia-smi, and dmesg for Xid."
        found.append(assess(_SECTION, "links", f"copies to and from the host do not work: {error}", bad=advice))
    elif len(found) > 1:
        found += _links(links)
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


def _links(links: dict[str, Any]) -> list[Finding]:
    count = len(links["gpus"])
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    peers, atomics = links["peers"], links["atomics"]
    apart = [f"{i}-{j}" for i, j in pairs if not (peers[i][j] and peers[j][i])]
    nvlink = [f"{i}-{j}" for i, j in pairs if atomics[i][j]]
    together = f"all GPUs at once, both ways: {bandwidth(links['all_at_once'])} each way and GPU"
    found = [Finding(_SECTION, "copies", "good", together, facts={"all_at_once": links["all_at_once"]})]
    facts = {"peers": peers, "atomics": atomics}
    if apart:
        advice = "GPUs exchange through host memory there; NCCL is often slow so, and backend photinus is meant for "
        advice += "that: `photinus bench --device cuda` measures both, and the faster one is taken from then on."
        value = f"no peer access between {_some(apart)}" + (f"; NVLink between {_some(nvlink)}" if nvlink else "")
        return [*found, assess(_SECTION, "links", value, note=advice, facts=facts)]
    how = "over NVLink" if len(nvlink) == len(pairs) else f"NVLink between {_some(nvlink)}" if nvlink else "over PCIe"
    return [*found, assess(_SECTION, "links", f"every GPU reaches every other directly ({how})", facts=facts)]


def _some(pairs: list[str]) -> str:
    return ", ".join(pairs[:_SHOWN]) + (" ..." if len(pairs) > _SHOWN else "")
