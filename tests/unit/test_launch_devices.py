"""How many workers a host gets, and the refusals with both numbers."""

from __future__ import annotations

import os

import pytest

from photinus.errors import DeviceError, UsageError
from photinus.run.local.devices import (
    WorkerCount,
    check_devices,
    choose_worker_count,
    count_gpus,
    gpu_names,
    usable_cores,
    visible_devices,
)


def choose(wanted, *, gpus, cores=6, cpu_only=False, ranks_per_gpu=1):
    return choose_worker_count(
        wanted, cpu_only=cpu_only, gpus=lambda: gpus, cores=lambda: cores, ranks_per_gpu=ranks_per_gpu
    )


def test_auto_takes_the_gpus_and_without_any_the_cores():
    assert choose("auto", gpus=4) == WorkerCount(4, "one per GPU")
    assert choose("auto", gpus=0).count == 6
    assert "no GPU" in choose("auto", gpus=0).reason
    assert choose("auto", gpus=4, cpu_only=True).count == 6


def test_gpu_and_cpu_by_name():
    assert choose("gpu", gpus=2).count == 2
    assert choose("cpu", gpus=2).count == 6


def test_a_number_is_taken_without_comment():
    assert choose(3, gpus=0) == WorkerCount(3)
    assert choose(4, gpus=4) == WorkerCount(4)
    assert choose(8, gpus=4, cpu_only=True) == WorkerCount(8)


def test_gpus_are_not_asked_for_when_they_do_not_matter():
    def never():
        raise AssertionError("asking needs torch")

    assert choose_worker_count("cpu", cpu_only=True, gpus=never, cores=lambda: 2).count == 2
    assert choose_worker_count(5, cpu_only=True, gpus=never, cores=lambda: 2).count == 5


def test_gpus_are_counted_beside_a_file_with_the_name_of_a_module_that_torch_uses(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('this is not the random of Python')")
    monkeypatch.chdir(tmp_path)
    assert count_gpus("xpu", os.environ) >= 0


def test_gpu_asked_for_and_absent_is_refused(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DeviceError, match=r"one worker per GPU, but torch sees 0 GPUs here\."):
        choose("gpu", gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=r"0 GPUs here \(CUDA_VISIBLE_DEVICES=''\)"):
        choose("gpu", gpus=0)


def test_more_workers_than_gpus_is_refused_with_both_numbers():
    with pytest.raises(DeviceError, match=r"asks for 4 workers, but this host has 2 GPUs.*--nproc-per-node 2"):
        choose(4, gpus=2)


def test_usable_cores_follow_the_affinity():
    everywhere = os.sched_getaffinity(0)
    assert 1 <= usable_cores() <= len(everywhere)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, everywhere)


@pytest.mark.parametrize(
    ("numbers", "visible", "expected"),
    [((0, 3), None, "0,3"), ((0, 1), "4,5,6", "4,5"), ((2,), "GPU-aa, GPU-bb,GPU-cc", "GPU-cc")],
)
def test_devices_are_counted_among_those_that_are_visible(numbers, visible, expected):
    assert visible_devices(numbers, visible) == expected


def test_a_device_that_is_not_visible_is_named():
    with pytest.raises(DeviceError, match="--device names GPU 3, but CUDA_VISIBLE_DEVICES='4,5' shows 2 here"):
        visible_devices((0, 3), "4,5")


def test_fewer_gpus_than_devices_named_is_told_with_both_numbers():
    with pytest.raises(DeviceError, match="--device 0,7 names 2 GPUs, but torch sees 1 of them here"):
        check_devices((0, 7), 1)
    check_devices((0, 7), 2)


def test_workers_share_gpus_only_on_purpose():
    with pytest.raises(DeviceError, match=r"1 GPU, and each worker needs its own.*--ranks-per-gpu 2"):
        choose(2, gpus=1)
    assert choose(2, gpus=1, ranks_per_gpu=2) == WorkerCount(2)
    assert choose("auto", gpus=2, ranks_per_gpu=3) == WorkerCount(6, "3 per GPU")
    assert choose("auto", gpus=0, ranks_per_gpu=2).count == 6
    with pytest.raises(DeviceError, match=r"asks for 5 workers.*each GPU takes 2\. Give --nproc-per-node 4"):
        choose(5, gpus=2, ranks_per_gpu=2)


def test_each_worker_knows_its_gpu_by_the_number_that_nvidia_smi_shows():
    assert gpu_names(2, 4, None, 1) == ("GPU 0", "GPU 1")
    assert gpu_names(2, 2, "3, 5", 1) == ("GPU 3", "GPU 5")
    assert gpu_names(3, 2, None, 2) == ("GPU 0", "GPU 0", "GPU 1")
    assert gpu_names(4, 0, None, 1) == ()


def test_a_slip_in_the_number_of_workers_is_refused_and_the_flag_that_allows_it_named():
    with pytest.raises(
        UsageError, match=r"asks for 200000 workers, but this host has 6 usable cores .*24 here.*--oversub"
    ):
        choose(200_000, gpus=0)
    assert choose(24, gpus=0).count == 24
    assert choose(25, gpus=25).count == 25
    with pytest.raises(UsageError):
        choose(25, gpus=25, cpu_only=True)
    many = choose_worker_count(25, cpu_only=True, gpus=int, cores=lambda: 6, oversubscribe=True)
    assert many.count == 25
