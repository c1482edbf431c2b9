"""The code in the documentation runs, and prints what the page says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
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
    "docs/data-order.md",
    "docs/data-sources.md",
    "docs/gauntlet.md",
    "docs/orchestrator.md",
    "docs/runs.md",
    "docs/staying-alive.md",
    "docs/train-config.md",
    "docs/training.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_says(page, tmp_path):
    assert run_page(page, tmp_path) == []


def test_every_link_leads_somewhere():
    pages = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    broken = []
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in _LINK.findall(text):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
