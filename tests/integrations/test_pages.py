"""The code in the documentation runs, and prints what the page says it prints. Each page is a program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def run_page(page: str, folder: Path) -> list[str]:
    """All blocks of a page as one script; what the page says that it does not print."""
    source = "\n\n".join(_BLOCK.findall((ROOT / page).read_text(encoding="utf-8")))
    script = folder / "page.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"
    printed = iter(done.stdout.splitlines())
    # In this order, with anything in between; a remark may follow what is printed.
    return [
        said for said in _SAID.findall(source) if not any(line and said.startswith(line) for line in printed)
    ]


PAGES = (
    "README.md",
    "docs/callbacks.md",
    "docs/checked-shards.md",
    "docs/checkpoints.md",
    "docs/context-trainers.md",
    "docs/data-order.md",
    "docs/data-sources.md",
    "docs/ddp-trainer.md",
    "docs/front-doors.md",
    "docs/gauntlet.md",
    "docs/manager.md",
    "docs/orchestrator.md",
    "docs/recipes.md",
    "docs/runs.md",
    "docs/start-here.md",
    "docs/staying-alive.md",
    "docs/train-config.md",
    "docs/training.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_says(page, tmp_path):
    assert run_page(page, tmp_path) == []
