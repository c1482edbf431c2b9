"""Run a user's script in a process that Python had started for something else, as Python itself runs it: as
`__main__`, with its arguments, and with its folder first among the import paths.

`running_as_main` gives everything back afterwards; `become_main` is for a process that has nothing else to do
and ends with the script.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType

from paceline.core.errors import UsageError


@contextmanager
def running_as_main(path: str, arguments: Sequence[str] = ()) -> Iterator[tuple[CodeType, ModuleType]]:
    """Make the script this process's `__main__` inside the block; the caller executes its code."""
    file = os.path.abspath(path)
    code = compiled(path, file)
    main, argv, places = sys.modules["__main__"], sys.argv, sys.path[:]
    module = sys.modules["__main__"] = main_module(file)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(file))
    try:
        yield code, module
    finally:
        sys.modules["__main__"], sys.argv = main, argv
        sys.path[:] = places


def become_main(script: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a script, or with `is_module` what `python -m` would, to its end. What it raises, SystemExit too,
    is raised, and the process stays the script's: its threads and exit handlers still find it."""
    __tracebackhide__ = True
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *(["-m"] if is_module else []), *sys.argv]
    if is_module:
        sys.modules["__main__"] = ModuleType("__main__")
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        return
    file = os.path.abspath(script)
    code = compiled(script, file)
    module = sys.modules["__main__"] = main_module(file)
    if not sys.flags.safe_path:
        # Python follows links here: the modules beside a script are those beside the file itself.
        sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    exec(code, module.__dict__)


def main_module(file: str) -> ModuleType:
    """Return an empty `__main__` for a script."""
    module = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None, __loader__=loader)
    return module


def compiled(path: str, file: str) -> CodeType:
    """Return the code of a script; UsageError where it cannot be read or is not text."""
    __tracebackhide__ = True
    try:
        # Reads the encoding that the file declares, as Python does.
        with io.open_code(file) as source:
            return compile(source.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(
            f"the script {path} cannot be read: {error.strerror}",
            remedy="give the path of a Python file: paceline train script.py, paceline run script.py",
        ) from None
    except ValueError as error:
        raise UsageError(f"the script {path} is not Python: {error}", remedy="give a Python file") from None
