"""The code of docs/other-frameworks.md runs, in the environment that has these frameworks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.clusters.framework_jobs import BIN, finished, started

PAGE = Path(__file__).parent.parent.parent / "docs" / "other-frameworks.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_has_code_for_both():
    assert ["HorovodTrainer" in block for block in BLOCKS] == [True, False]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "package"), [(0, "horovod"), (1, "tensorflow")])
def test_the_code_of_the_page_runs(tmp_path: Path, number: int, package: str):
    if find_spec(package) is None:
        pytest.skip(f"no {package} here: make test-engines installs it")
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{BLOCKS[number]}", encoding="utf-8")
    with started([str(BIN / "python"), str(script)], log) as job:
        finished(job, log, 240.0)
    assert list((tmp_path / "runs").glob(f"*-{package}/checkpoints/v*/manifest.json"))
