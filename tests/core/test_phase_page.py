"""What a worker did last can be read after it was killed; other files are no trouble."""

from __future__ import annotations

import subprocess
import sys
import timeit

from paceline.core import phase_page
from paceline.core.phase_page import PhasePage, page_file

WORKER = """
import os, sys
from pathlib import Path
from paceline.core.phase_page import PhasePage
page = PhasePage(Path(sys.argv[1]))
for step in range(1, 1000):
    for phase in ("data", "forward", "collective"):
        page.write(phase, step)
        if (step, phase) == (412, "forward"):
            os.kill(os.getpid(), 9)
"""


def test_it_outlives_its_writer(tmp_path):
    path = page_file(tmp_path, 7)
    subprocess.run([sys.executable, "-c", WORKER, str(path)], timeout=60)
    seen = phase_page.read(path)
    assert seen is not None
    assert (seen.phase, seen.step) == ("forward", 412)


def test_what_is_written_is_read_and_gone_in_peace(tmp_path):
    path = page_file(tmp_path, 1)
    page = PhasePage(path)
    assert phase_page.read(path) is None
    for phase, step in (("collective", 1 << 40), ("data", 0)):
        page.write(phase, step)
        seen = phase_page.read(path)
        assert seen is not None
        assert (seen.phase, seen.step) == (phase, step)
    page.close()
    assert not path.exists()
    assert phase_page.read(path) is None


def test_other_files_say_nothing(tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "long").write_bytes(b"x" * 1000)
    for name in ("short", "long", "missing", "."):
        assert phase_page.read(tmp_path / name) is None


def test_writing_is_cheap(tmp_path):
    page = PhasePage(tmp_path / "page")
    assert min(timeit.repeat(lambda: page.write("forward", 7), number=2000, repeat=5)) / 2000 < 20e-6
    page.close()


def test_what_is_left_after_a_step_is_read_beside_the_phase(tmp_path):
    path = page_file(tmp_path, 1)
    page = PhasePage(path)
    assert phase_page.left(path) is None
    page.leave(12, (1 << 48) - 1)
    page.tick()
    page.write("data", 13)
    assert phase_page.left(path) == (12, (1 << 48) - 1)
    seen = phase_page.read(path)
    assert seen is not None
    assert (seen.phase, seen.step) == ("data", 13)
    page.close()
    assert phase_page.left(path) is None
