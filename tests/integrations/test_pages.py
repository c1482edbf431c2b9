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


def _commands(block: str) -> list[str]:
    first = block.splitlines()[0]
    return re.findall(r"`python (\w+\.py[^`]*)`", first) if first.startswith("# ") else []


def run_together(block: str, commands: list[str], folder: Path) -> None:
    (folder / commands[0].split()[0]).write_text(block, encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, *command.split()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        for process in started:
            printed, _ = process.communicate(timeout=100)
            assert process.returncode == 0, printed
    finally:
        for process in started:
            process.kill()
            process.communicate()


def run_page(page: str, folder: Path) -> list[str]:
    """All blocks of a page as one script; what the page says that it does not print. A block that begins with
    a comment of commands that start it (`python rank.py 0`) is a script of its own, started so at once."""
    blocks = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    for block in blocks:
        if commands := _commands(block):
            run_together(block, commands, folder)
    source = "\n\n".join(block for block in blocks if not _commands(block))
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


def pages() -> list[str]:
    """The README and every page with code."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in found if _BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", pages())
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_says(page, tmp_path):
    assert run_page(page, tmp_path) == []


def test_all_pages_with_code_are_found():
    assert len(pages()) >= 29
    indented = re.compile(r"^ +```", re.MULTILINE)  # a block that would not be found
    assert [
        page for page in (ROOT / "docs").rglob("*.md") if indented.search(page.read_text(encoding="utf-8"))
    ] == []
