"""What stays in a process when it frees a large block."""

import subprocess
import sys

import pytest

# malloc and not Python's own allocator; written to, so that pages are there.
PROGRAM = """
import contextlib, ctypes, sys
from paceline.core.freed_memory import keep_freed_memory, kept_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 64 << 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def kept_of_a_freed_block():
    before = resident()
    block = libc.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    libc.free(block)
    return (resident() - before) / SIZE

if sys.argv[1] == "for good":
    keep_freed_memory()
    with kept_freed_memory():
        pass
    print(kept_of_a_freed_block())
elif sys.argv[1] == "block":
    with kept_freed_memory():
        with kept_freed_memory():
            pass
        inside = resident()
        print(kept_of_a_freed_block())
    print((resident() - inside) / SIZE)
else:
    print(kept_of_a_freed_block())
"""


def kept_shares(way, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True, env=environment
    )
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("way", "environment", "expected"),
    [
        ("not at all", {}, [0]),
        ("for good", {}, [1]),
        ("block", {}, [1, 0]),
        ("for good", {"MALLOC_TRIM_THRESHOLD_": "131072"}, [0]),
        ("for good", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, [0]),
        ("block", {"MALLOC_TRIM_THRESHOLD_": "131072"}, [0, 0]),
    ],
)
def test_a_freed_block(way, environment, expected):
    assert kept_shares(way, **environment) == pytest.approx(expected, abs=0.1)
