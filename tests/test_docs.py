"""The documentation is true where a test can tell: links, names of the API, settings, commands.

Its code runs in tests/integrations/test_pages.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests import called_functions

import paceline

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


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


def test_the_reference_has_every_public_name():
    """By the object that each entry names; the entry of a module has all that it defines."""
    entries = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    found = set[int]()
    for entry in entries:
        home, _, name = entry.rpartition(".")
        named = getattr(importlib.import_module(home), name)
        found |= {id(one) for one in vars(named).values()} if isinstance(named, ModuleType) else {id(named)}
    # Modules of functions that are entries themselves, and the exit codes, which docs/runs.md has.
    aside = {
        "metrics",
        "gradient_checkpointing",
        "torch_backend",
        "tune",
        "STOPPED_EXIT_CODE",
        "SUPERVISOR_LOST_EXIT_CODE",
    }
    assert [
        name for name in paceline.__all__ if name not in aside and id(getattr(paceline, name)) not in found
    ] == []


COMMAND = re.compile(r"`(?:\.venv/bin/)?paceline ([a-z][^`\n]*)`|^    paceline ([a-z].*)$", re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        str(page.relative_to(ROOT))
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if page.name != "cli.md"
    ],
)
def test_every_command_and_option_that_a_page_names_exists(page):
    """docs/cli.md is generated from the commands, so a section of it has all that a command takes."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## paceline (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    wrong = []
    for found in COMMAND.finditer((ROOT / page).read_text(encoding="utf-8")):
        command = found.group(1) or found.group(2)
        own = command.split(" -- ")[0]  # what follows is the script's
        section = sections.get(own.split()[0].rstrip(",:"), "")
        options = re.findall(r"(?<!\S)--?[a-z][\w-]*", own)
        wrong += [command for option in options if not re.search(rf"{option}(?![\w-])", section)]
        wrong += [] if section else [command]
    assert wrong == []


def test_tables_and_lists_are_such_on_the_site():
    """The site's Markdown wants a heading row over every table, and an empty line before a list."""
    wrong = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = ["", *text.splitlines()]
        for before, line, after in zip(lines, lines[1:], [*lines[2:], ""], strict=False):
            begins_table = line.startswith("|") and not before.startswith("|")
            begins_list = (
                re.match(r"[*-] |1\. ", line) and before and not re.match(r" |[*-] |\d+\. |<!--", before)
            )
            if (begins_table and not after.startswith("|-")) or begins_list:
                wrong.append(f"{page.relative_to(ROOT)}: {line[:60]}")
    assert wrong == []


NAMING_PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)

# Files that pages name and that are not in the tree, with the reason.
NO_FILES = {
    ("CONTRIBUTING.md", "utils.py"): "says that there is none",
    (
        "docs/design/0016-the-supervisor.md",
        "core/control/exact.py",
    ): "replaced; named with the last commit that had it",
    ("docs/extending.md", "test_mine.py"): "a reader's",
    ("docs/starting-ranks.md", "rank.py"): "a reader's",
    ("docs/staying-alive.md", "script.py"): "a reader's",
}


@cache
def _python_files() -> frozenset[str]:
    """The names of all Python files of the repository, without their folders."""
    folders = ("src", "tests", "bench", "examples", "docs")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _is_there(page: str, name: str) -> bool:
    """Whether a path leads to a file from the page, the root, src/ or src/paceline/; a name alone: from any
    folder."""
    if "/" not in name:
        return name in _python_files()
    places = ((ROOT / page).parent, ROOT, ROOT / "src", ROOT / "src" / "paceline")
    return any((place / name).is_file() for place in places)


def _named_files(page: str) -> set[str]:
    """The Python files that a page names: by a path, or by the file's name in backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return {
        *re.findall(r"(?<![\w/.-])((?:[\w-]+/)+\w+\.py)\b", text),
        *re.findall(r"`[^`\n]*?(?<![\w/.-])(\w+\.py)\b", text),
    }


@pytest.mark.parametrize("page", NAMING_PAGES)
def test_every_module_that_a_page_names_exists(page):
    missing = {name for name in _named_files(page) if not _is_there(page, name)}
    assert missing == {name for where, name in NO_FILES if where == page}


def test_the_files_that_pages_name_are_found():
    assert len(_named_files("docs/glossary.md")) > 30
    assert {"utils.py", "tests/test_architecture.py"} <= _named_files("CONTRIBUTING.md")
    assert not _is_there("docs/glossary.md", "algorithms/tree.py")


def _draw_walks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_walks", ROOT / "docs" / "img" / "draw_walks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["draw_walks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wrong_call(caller: Any, call: Any, port: str | None) -> str:
    """Why the source does not say that `caller` calls `call`; empty: it does. `port`: the name that is
    called, where it is not a plain call."""
    name = port or call.function
    found = [one for one in called_functions.calls(caller.file, caller.function) if one.name == name]
    if not found:
        read = called_functions.reads(caller.file, caller.function, name)
        is_property = read and called_functions.is_property(call.file, name)
        return "" if is_property else f"{caller.file}:{caller.function} does not call {name}"
    if port is not None:
        return ""
    if all(one.passed_in for one in found):
        return f"{caller.file}:{caller.function} calls a {name} that was passed in: mark it with via"
    homes = {one.file for one in found if not one.passed_in}
    if None not in homes and call.file not in homes:
        return f"{caller.file}:{caller.function} calls the {name} of {', '.join(sorted(map(str, homes)))}"
    return ""


# Folders of one layer, lowest first; loose modules of a layer are below its folders, except those named here.
STOREYS = {
    "train": ("settings", "step", "state", "loop", "member"),
    "elastic": ("machine", "supervisor"),
    "comm": (
        *("compression", "transport", "rendezvous", "algorithms", "collectives"),
        *("context.py", "state_transfer.py"),
    ),
}


NUMBERS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)


@cache
def _height(file: str) -> tuple[int, int]:
    """The layer of a source file, and its folder in the layer."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    heights = {name: -row for row, names in enumerate(layers) for name in names.split(" | ")}
    layer, folder, *_ = file.split("/")
    storeys = STOREYS.get(layer, ())
    return heights[layer], storeys.index(folder) + 1 if folder in storeys else 0


def test_the_walks_are_true_and_never_go_back_up():
    """Every function exists, and the body of the function above it calls it. A call leads to no higher layer
    or folder, nor into a file that waits further up; "via FILE" marks a call through a port that is declared
    in a file not above the caller: the body calls the port, by the function's name or "as NAME"."""

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
                if not any(called_functions.scopes(call.file, call.function)):
                    wrong.append(f"{here} does not exist")
                for caller in callers[:1]:
                    declared, port = via.groups() if via else (caller.file, None)
                    called = port or call.function
                    if problem := _wrong_call(caller, call, called if via else None):
                        wrong.append(f"{here}: {problem}")
                    if via and not re.search(rf"\b{called}\b", source(declared)):
                        wrong.append(f"{here} is not declared in {declared}")
                    if _height(declared) > _height(caller.file):
                        wrong.append(f"{here} goes through {declared}, above its caller")
                    if not via and _height(call.file) > _height(caller.file):
                        wrong.append(f"{here} is above its caller {caller.file}")
                files = [one.file for one in callers]
                if call.file in files[1:] and call.file != files[0]:
                    wrong.append(f"{here} goes back up")
    assert wrong == []


def test_the_walks_say_how_many_calls_are_answered_in_a_higher_folder():
    raised = {
        name: sum(
            _height(call.file) > _height(caller.file)
            for lane in lanes
            for call in lane.calls
            for caller in list(lane.callers(call))[:1]
        )
        for name, lanes in _draw_walks().walks().items()
    }
    total, step, kill, checkpoint = (
        NUMBERS[count]
        for count in (sum(raised.values()), *(raised[one] for one in ("step", "kill", "checkpoint")))
    )
    text = " ".join((ROOT / "docs" / "walks.md").read_text(encoding="utf-8").split())
    assert (
        f"{total.capitalize()} drawn calls ({step} of the step, {kill} of the kill, "
        f"{checkpoint} of the checkpoint) are answered in a higher folder; each goes through a port."
    ) in text


def test_a_picture_sets_calls_through_ports_apart_and_counts_them():
    module = _draw_walks()
    for name, lanes in module.walks().items():
        picture = module.draw(name, lanes)
        legend = re.search(r">(\d+) direct calls<.*?>(\d+) calls \"via FILE\"", picture, re.DOTALL)
        assert legend is not None
        direct, through = map(int, legend.groups())
        assert through == sum(call.remark.startswith("via ") for lane in lanes for call in lane.calls)
        # One line of each kind is the legend's.
        assert (picture.count('class="hop"'), picture.count('class="hop port"')) == (direct + 1, through + 1)


def test_a_call_that_is_none_is_found(tmp_path, monkeypatch):
    """A name that is only mentioned, another module's function, another class's method, and a function that
    was passed in are no plain calls of a walk."""
    (tmp_path / "below.py").write_text("def helper(): ...\n\nclass Part:\n    def run(self): ...\n")
    (tmp_path / "other.py").write_text("from paceline.below import helper\n\ndef run(): ...\n")
    (tmp_path / "above.py").write_text(
        "from paceline import below\nfrom paceline.other import helper\nfrom paceline.below import Part\n\n"
        "class Job:\n"
        "    start: Callable\n    part: Part\n"
        "    def go(self, given):\n        self.start()\n        self.part.run()\n        helper()\n"
        "        given()\n        self.left.run_later\n        self.stop()\n"
        "    def stop(self): ...\n"
    )
    monkeypatch.setattr(called_functions, "PACKAGE", tmp_path)
    found = {one.name: (one.file, one.passed_in) for one in called_functions.calls("above.py", "go")}
    assert found == {
        "start": (None, True),
        "run": ("below.py", False),
        "helper": ("below.py", False),
        "given": (None, True),
        "stop": ("above.py", False),
    }
    go = SimpleNamespace(file="above.py", function="go")

    def wrong(file: str, function: str, port: str | None = None) -> str:
        return _wrong_call(go, SimpleNamespace(file=file, function=function), port)

    assert wrong("below.py", "helper") == wrong("below.py", "run") == wrong("any.py", "begin", "start") == ""
    assert "was passed in" in wrong("below.py", "start")
    assert "calls the run of below.py" in wrong("other.py", "run")
    assert "does not call run_later" in wrong("below.py", "run_later")


def test_the_pictures_of_the_walks_are_those_of_the_text():
    module = _draw_walks()
    for name, lanes in module.walks().items():
        picture = ROOT / "docs" / "img" / f"walk-{name}.svg"
        assert picture.read_text(encoding="utf-8") == module.draw(name, lanes), "run docs/img/draw_walks.py"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
