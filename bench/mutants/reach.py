"""Which functions each test and each simulated schedule calls.

A change in a function can only be noticed by what calls it, so a mutant is tried with those tests and
schedules alone, the quickest first. Found once, on the source without a change.
"""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass
class Reach:
    """What was called, as "path:function", by each thing that was run, and how long that took."""

    below: Path
    called: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """Note what is called inside."""
        root, found = f"{self.below}/", self.called.setdefault(name, set())

        def note(frame: FrameType, event: str, argument: Any) -> None:
            path = frame.f_code.co_filename
            if path.startswith(root):
                found.add(f"{path[len(root) :]}:{outermost(frame.f_code.co_qualname)}")

        began = time.perf_counter()
        # Also in threads that are started inside: the ranks of a collective are threads.
        threading.settrace(note)
        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.seconds[name] = time.perf_counter() - began

    def by_function(self) -> dict[str, list[str]]:
        """Who calls each function, the quickest first."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.called, key=lambda one: self.seconds[one]):
            for function in self.called[name]:
                found.setdefault(function, []).append(name)
        return found


def outermost(qualified: str) -> str:
    """The function of a module or the method of a class that this code is in."""
    return qualified.partition(".<locals>")[0]


def function_at(text: str, line: int) -> str | None:
    """The name of the outermost function that has this line; None: none has, it runs on import."""

    def find(body: list[ast.stmt], within: str) -> str | None:
        for node in body:
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                if isinstance(node, ast.ClassDef):
                    return find(node.body, f"{within}{node.name}.")
                # Defaults of parameters are evaluated on import.
                if isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno:
                    return f"{within}{node.name}"
        return None

    return find(ast.parse(text).body, "")
