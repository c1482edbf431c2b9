"""Utilisation and memory of this machine's GPUs, from the driver's library (NVML); nothing without one.

Through ctypes: a process that only waits for a run needs neither torch nor a package for it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, final

from paceline.core.clock import Clock, MonotonicClock

_LIBRARY = "libnvidia-ml.so.1"
_LEAST_SECONDS = 1.0  # between two readings: the driver itself averages over about as long
_GIB = 1 << 30


class _GpuUtilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _GpuMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@final
class GpuReadings:
    """Readings of the GPUs that CUDA_VISIBLE_DEVICES leaves, under the driver's numbers; pickles unopened."""

    def __init__(self, clock: Clock | None = None, library: str = _LIBRARY) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._name = library
        self._nvml: Any = None
        self._devices: dict[int, ctypes.c_void_p] | None = None  # None: not looked for yet
        self._read_at = 0.0

    def read(self) -> dict[str, float]:
        """Return the numbers by name; empty without a GPU, or when the last reading is not a second old."""
        now = self._clock.now()
        if self._devices is None:
            self._devices = self._find()
        elif now - self._read_at < _LEAST_SECONDS:
            return {}
        self._read_at = now
        found: dict[str, float] = {}
        for index, device in self._devices.items():
            busy, memory = _GpuUtilisation(), _GpuMemory()
            if self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0:
                found[f"gpu/{index}/utilisation"] = float(busy.gpu)
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                found[f"gpu/{index}/memory_gib"] = memory.used / _GIB
        return found

    def _find(self) -> dict[int, ctypes.c_void_p]:
        try:
            self._nvml = ctypes.CDLL(self._name)
        except OSError:
            return {}  # no driver, no GPU
        count = ctypes.c_uint()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        devices = {}
        for index in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), count.value):
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                devices[index] = device
        return devices

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nvml": None, "_devices": None}


def visible(setting: str | None, count: int) -> list[int]:
    """Return the numbers that CUDA_VISIBLE_DEVICES leaves of `count` GPUs; all of them where it names GPUs by
    other names than numbers."""
    names = [] if setting is None else [name.strip() for name in setting.split(",")]
    if setting is not None and not setting.strip():
        return []
    if not names or not all(name.lstrip("-").isdigit() for name in names):
        return list(range(count))
    chosen = []
    for name in names:
        if not 0 <= int(name) < count:
            break  # as CUDA does: what follows a number that is none does not count
        chosen.append(int(name))
    return chosen
