"""The machine has no randomness but what the seed gives, and depends on no clock. Modules that it must not
import are forbidden in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline.elastic.machine

FOLDER = Path(paceline.elastic.machine.__file__).parent


def test_random_numbers_come_from_a_seed():
    used = []
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("random", "secrets", "uuid"), file.name
            if isinstance(node, ast.Import):
                assert not {name.name for name in node.names} & {"secrets", "uuid"}, file.name
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "random"
            ):
                used.append((file.name, node.attr))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "random.Random":
                assert len(node.args) == 1, f"{file.name}: random.Random without a seed"
    assert used == [("budgets.py", "Random")]


def test_nothing_depends_on_the_order_of_hashes():
    """Sets of numbers have one order in all processes; sets of strings do not. The machine keeps none."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign):
                assert "set[str]" not in ast.unparse(node.annotation), file.name
