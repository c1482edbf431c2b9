"""The machine has no randomness but what the seed gives, and opens no file. Modules that it must not import
are forbidden in pyproject.toml; these tests see what is done with the excepted one, and with builtins.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.elastic.machine

FOLDER = Path(paceline.elastic.machine.__file__).parent
IMPURE_BUILTINS = {"__import__", "breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}


def impurities(tree: ast.Module) -> Iterator[str]:
    """Randomness without a seed, under whatever name it is imported, and builtins that do I/O, run text or
    differ from process to process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "random",
            "secrets",
            "uuid",
        ):
            yield f"from {node.module}"
        elif isinstance(node, ast.Import):
            # By its own name, so that every use of it is seen.
            yield from (
                f"import {name.name}" + (f" as {name.asname}" if name.asname else "")
                for name in node.names
                if name.name in ("secrets", "uuid") or (name.name == "random" and name.asname)
            )
        elif isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS:
            yield node.id
    seeded = set(map(id, seeded_modules(tree)))
    yield from ("random" for node in ast.walk(tree) if is_name(node, "random") and id(node) not in seeded)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def seeded_modules(tree: ast.Module) -> Iterator[ast.expr]:
    """The `random` of each `random.Random(seed)`, with a seed that is made of something."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not is_name(node.func.value, "random") or node.func.attr != "Random":
            continue
        match node.args, node.keywords:
            case [ast.Starred()], []:
                pass
            case [seed], [] if any(isinstance(part, ast.Name) for part in ast.walk(seed)):
                yield node.func.value


@pytest.mark.parametrize(
    "planted",
    [
        "import random as r\nr.random()",
        "import random\nrandom.random()",
        "import random\nrandom.Random()",
        "import random\nrandom.Random(None)",
        "import random\nrandom.Random(x=seed)",
        "import random\nrandom.Random(*seeds)",
        "import random\nrandom.SystemRandom(seed)",
        "import random\nr = random\nr.random()",
        "import random\ngetattr(random, name)(seed)",
        "from random import Random\nRandom(seed)",
        "import secrets",
        "import uuid as u",
        "from uuid import uuid4",
        "open(path)",
        "read = open",
        "hash(text)",
    ],
)
def test_what_is_impure_is_found(planted: str):
    assert [*impurities(ast.parse(planted))]


def test_a_generator_with_a_seed_is_pure():
    assert [*impurities(ast.parse("import random\nrandom.Random(f'{seed}:{slot}').random()"))] == []


def test_the_machine_is_pure():
    found = {
        file.name: [*impurities(ast.parse(file.read_text(encoding="utf-8")))] for file in FOLDER.glob("*.py")
    }
    assert len(found) > 15
    assert {name: what for name, what in found.items() if what} == {}


def test_nothing_depends_on_the_order_of_hashes():
    """Sets of numbers have one order in all processes; sets of strings do not. The machine keeps none."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign):
                assert "set[str]" not in ast.unparse(node.annotation), file.name
