"""The code in the documentation runs, and prints what the page says it prints."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("page", ["docs/glossary.md", "docs/walks.md"])
def test_every_module_that_a_page_names_exists(page):
    named = re.findall(r"[`>\s]((?:[a-z_]+/)+[a-z_]+\.py)\b", (ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / "src" / "paceline" / path).is_file()] == []


def _draw_walks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_walks", ROOT / "docs" / "img" / "draw_walks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["draw_walks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Folders of one layer, lowest first; loose modules of a layer are below its folders.
STOREYS = {
    "train": ("settings", "step", "state", "loop", "member"),
    "elastic": ("machine", "supervisor"),
}


def test_the_walks_are_true_and_never_go_back_up():
    """Every function exists, and its caller's file names it. A call leads to no higher layer or folder, nor
    into a file that waits further up; "via FILE" marks a call through an interface that is declared in a file
    not above the caller, under the function's name or "as NAME"."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    heights = {name: -row for row, names in enumerate(layers) for name in names.split(" | ")}

    def height(file: str) -> tuple[int, int]:
        layer, folder, *_ = file.split("/")
        storeys = STOREYS.get(layer, ())
        return heights[layer], storeys.index(folder) + 1 if folder in storeys else 0

    def source(file: str) -> str:
        return (ROOT / "src" / "paceline" / file).read_text(encoding="utf-8")

    walks = _draw_walks().walks()
    assert set(walks) == {"step", "kill", "checkpoint"}
    wrong = []
    for name, lanes in walks.items():
        assert sum(len(lane.calls) for lane in lanes) > 15
        for lane in lanes:
            for call in lane.calls:
                here = f"{name}: {call.file}:{call.function}"
                callers = list(lane.callers(call))
                via = re.match(r"via (\S+\.py)(?: as (\w+))?", call.remark)
                if not re.search(rf"def {call.function}\(", source(call.file)):
                    wrong.append(f"{here} does not exist")
                for caller in callers[:1]:
                    declared, name_there = via.groups() if via else (caller.file, None)
                    if not re.search(rf"\b{name_there or call.function}\b", source(declared)):
                        wrong.append(f"{here} is not named in {declared}")
                    if height(declared) > height(caller.file):
                        wrong.append(f"{here} goes through {declared}, above its caller")
                    if not via and height(call.file) > height(caller.file):
                        wrong.append(f"{here} is above its caller {caller.file}")
                files = [one.file for one in callers]
                if call.file in files[1:] and call.file != files[0]:
                    wrong.append(f"{here} goes back up")
    assert wrong == []


def test_the_pictures_of_the_walks_are_those_of_the_text():
    module = _draw_walks()
    for name, lanes in module.walks().items():
        picture = ROOT / "docs" / "img" / f"walk-{name}.svg"
        assert picture.read_text(encoding="utf-8") == module.draw(name, lanes), "run docs/img/draw_walks.py"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
