"""`paceline.spawn` in a notebook: a real kernel, functions and classes of its cells, output in the cell."""

from __future__ import annotations

import os
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.leaky("the client of the kernel keeps the sockets of its event loop")

DEFINE = """
import os
from dataclasses import dataclass
import paceline

@dataclass
class Point:
    x: float

def work(ctx, point):
    print(f"hello from rank {ctx.rank}")
    return Point(ctx.all_reduce([point.x])[0])
"""
CALL = """
results = paceline.spawn(work, Point(2.0), workers=2)
assert all(type(result) is Point for result in results)
results
"""
CHANGE = """
def work(ctx, point):
    return "changed"
paceline.spawn(work, Point(2.0), workers=2)
"""
FAIL = """
def broken(ctx):
    nonsense = 1 / (ctx.rank - ctx.rank)
paceline.spawn(broken, workers=2)
"""
STOP = """
from paceline.engines.local import shutdown
shutdown()
"""


def run(*cells: str) -> list[Any]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    # A kernel that sees pytest leaves out what makes the output of other processes appear in its cells.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute(env=env)
    return [cell.outputs for cell in notebook.cells]


def text(outputs: list[Any]) -> str:
    return "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)


def test_cells_define_what_ranks_run_and_show_what_they_print():
    _, called, changed, _ = run(DEFINE, CALL, CHANGE, STOP)
    assert "hello from rank 0" in text(called)
    assert "hello from rank 1" in text(called)
    assert "[Point(x=4.0), Point(x=4.0)]" in text(called)
    assert "['changed', 'changed']" in text(changed)


def test_a_failure_shows_the_line_of_the_cell():
    with pytest.raises(CellExecutionError, match=r"nonsense = 1 / \(ctx\.rank - ctx\.rank\)") as caught:
        run(DEFINE, FAIL)
    assert "RankFailedError" in str(caught.value)
