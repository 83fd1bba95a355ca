"""What CUDA tensors need and is not there is said with what to do; over a driver that is none (tests.fake_cuda)."""

from __future__ import annotations

import ctypes
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from photinus import engine
from photinus.backend import torch_tools
from tests.fake_cuda import library, tensor_without_driver
from tests.ranks import run_ranks, values

MISSING = {
    "version=11040": ("is too old: it is of CUDA 11.4, and CUDA tensors need 12.0", "Update NVIDIA's driver"),
    "without=cuStreamWriteValue32": ("has no cuStreamWriteValue32", "Update NVIDIA's driver"),
    "gpus=0": ("CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"),
    "mode=3": ("GPU 0 (Fake, 0000:01:00.0)", "EXCLUSIVE_PROCESS", "nvidia-smi -c DEFAULT", "MPS"),
    "mode=2": ("PROHIBITED", "nvidia-smi -c DEFAULT"),
    "fail=cuMemHostRegister:1:800": ("cuMemHostRegister failed on GPU 0", "CUDA_ERROR_NOT_PERMITTED (800)", "use NCCL"),
    "fail=cuMemHostRegister:1:2": ("CUDA_ERROR_OUT_OF_MEMORY (2)", "ulimit -l"),
    "fail=cuInit:1:803": ("cuInit failed", "(803)", "reboot after an update"),
    "fail=cuDriverGetVersion:1:34": ("stub for linking", "LD_LIBRARY_PATH"),
}


def test_what_a_driver_lacks_is_an_error_of_one_line_with_what_to_do() -> None:
    library()
    (told,) = values(run_ranks(f"{__name__}:_ask_driver", world_size=1))
    for words, parts in MISSING.items():
        assert told[words].startswith("HostError: "), words
        assert "\n" not in told[words]
        for part in parts:
            assert part in told[words], words
    assert told["gpus=2 index=2"].startswith("ValueError: GPU 2: there are 2")
    assert told["gpus=2 index=1"] == "GPU 1 (Fake, 0000:01:00.0)"


def _ask_driver(rank: int, world_size: int) -> dict[str, str]:
    asked = {**dict.fromkeys(MISSING, 0), "gpus=2 index=2": 2, "gpus=2 index=1": 1}
    # A process each, for a driver that was opened stays.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        return dict(zip(asked, processes.starmap(_ask, asked.items(), chunksize=1), strict=True))


def _ask(words: str, gpu: int) -> str:
    driver = ctypes.CDLL(str(library()))  # the engine finds it by its name, since it is loaded already
    driver.fake_cuda_configure(words.replace(f" index={gpu}", "").encode())
    try:
        return engine.cuda_device(gpu).name
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_it_is_said_and_cpu_tensors_go_on() -> None:
    for said, total in values(run_ranks(f"{__name__}:_without_driver", world_size=2, backend="photinus")):
        assert said.startswith("HostError")
        assert "libcuda.so.1" in said
        assert total == 3.0


def test_tensors_of_a_torch_for_rocm_are_refused_before_a_driver_is_looked_for_and_cpu_tensors_go_on() -> None:
    for said, total in values(run_ranks(f"{__name__}:_with_rocm", world_size=2, backend="photinus")):
        assert said.startswith("HostError: this build of torch is for AMD's GPUs (ROCm 7.1)")
        assert "use the nccl backend, which is RCCL there" in said
        assert total == 3.0


def _with_rocm(rank: int, world_size: int) -> tuple[str, float]:
    torch_tools.ROCM = "7.1"
    return _without_driver(rank, world_size)


def _without_driver(rank: int, world_size: int) -> tuple[str, float]:
    try:
        dist.all_reduce(tensor_without_driver(torch.ones(2)))
        said = "nothing"
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return said, tensor.item()
