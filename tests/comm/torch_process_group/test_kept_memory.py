"""A process of a group reuses the memory that a step frees."""

import subprocess
import sys

PROGRAM = """
import torch
import torch.distributed as dist

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def kept_of_a_freed_gradient():
    before, gradient = resident(), torch.ones(16 << 20)
    size = gradient.nbytes
    del gradient
    return (resident() - before) / size

before = kept_of_a_freed_gradient()
dist.init_process_group("paceline", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print(before < 0.1, kept_of_a_freed_gradient() > 0.9)
dist.destroy_process_group()
"""


def test_a_freed_gradient_stays():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
