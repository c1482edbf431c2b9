"""Readings of GPUs from the driver's library."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess

import pytest
import torch
from tests.virtual_clock import VirtualClock

from paceline.monitor.trackers.gpu_readings import GpuReadings, visible

# The calls of the driver's library that are used; the second of two GPUs does not say how busy it is.
DRIVER = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1L); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = 75; rates[1] = 3;
    return device == (void *)1 ? 0 : 3;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 8ULL << 30; memory[1] = 5ULL << 30; memory[2] = 3ULL << 30;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("1,-1,0", [1]),
        ("0,7,1", [0]),
        ("GPU-8932f937-d72c", [0, 1, 2]),
    ],
)
def test_gpus_that_cuda_sees(setting, found):
    assert visible(setting, 3) == found


def test_without_a_driver_there_is_nothing_to_read():
    readings = GpuReadings(library="libno-such-driver.so")
    assert readings.read() == {}
    assert readings.read() == {}


def test_numbers_of_every_gpu_at_most_once_a_second(tmp_path, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = str(tmp_path / "libdriver.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, "driver.c"], cwd=tmp_path, check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    clock = VirtualClock(10.0)
    readings = GpuReadings(clock, library)
    expected = {"gpu/0/utilisation": 75.0, "gpu/0/memory_gib": 3.0, "gpu/1/memory_gib": 3.0}
    assert readings.read() == expected
    clock.advance(0.5)
    assert readings.read() == {}
    clock.advance(0.6)
    assert readings.read() == expected


def test_readings_travel_unopened():
    readings = GpuReadings(library="libno-such-driver.so")
    readings.read()
    assert pickle.loads(pickle.dumps(readings)).read() == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu():
    ctypes.CDLL("libnvidia-ml.so.1")
    held = torch.ones(256 << 20, device="cuda")  # 1 GiB
    found = GpuReadings().read()
    assert any(value >= 1.0 for name, value in found.items() if name.endswith("memory_gib"))
    assert any(name.endswith("utilisation") and 0.0 <= value <= 100.0 for name, value in found.items())
    del held
