"""Runs a user's script in this process as if Python had started it: as `__main__`, with its own arguments and
its folder first on the path; everything is put back afterwards. Must not know why it is run.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from paceline.core.errors import UsageError


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Returns when the script comes to its end; what it raises, SystemExit too, comes out of here."""
    file = os.path.abspath(path)
    code = _compiled(path, file)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    main, argv, places = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(file))
    try:
        exec(code, module.__dict__)
    finally:
        sys.modules["__main__"], sys.argv = main, argv
        sys.path[:] = places


def _compiled(path: str, file: str) -> CodeType:
    try:
        # Reads the encoding that the file declares, as Python does.
        with io.open_code(file) as source:
            return compile(source.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(
            f"the script {path} cannot be read: {error.strerror}",
            remedy="give the path of a Python file: paceline train script.py",
        ) from None
    except ValueError as error:
        raise UsageError(f"the script {path} is not Python: {error}", remedy="give a Python file") from None
