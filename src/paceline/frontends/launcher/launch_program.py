"""What each rank runs, and the import paths that a Python started for it alone would have."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import final

from paceline.core.errors import UsageError


@final
@dataclass(frozen=True)
class Program:
    """What each rank runs: a script, with `is_module` what `python -m` would run, with `executed` any
    program."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    executed: bool = False

    def check(self) -> None:
        """Refuse what cannot be run, before anything is started."""
        if self.is_module:
            self._check_module()
        elif not self.executed:
            self._check_script()

    def _check_module(self) -> None:
        """Look for the module's package alone: what is inside of it is found by importing it."""
        package = self.name.partition(".")[0]
        places = [*([] if sys.flags.safe_path else [os.getcwd()]), *paths_of_a_fresh_python(sys.path)]
        if package in sys.builtin_module_names or PathFinder.find_spec(package, places) is not None:
            return
        raise UsageError(
            f"there is no module {self.name}",
            remedy=f"start it in the folder that holds {package}, or put that folder into PYTHONPATH; a file "
            "is run without -m",
        )

    def _check_script(self) -> None:
        try:
            with open(self.name, "rb"):
                return
        except OSError as error:
            raise UsageError(
                f"the script {self.name} cannot be read: {error.strerror}",
                remedy="give the path of a Python file; with -m a module, with --no-python a program",
            ) from None


def paths_of_a_fresh_python(paths: Sequence[str]) -> list[str]:
    """Return the import paths without the one that Python put in front for this process's own program."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        own = os.getcwd()
    else:
        own = os.path.dirname(os.path.abspath(file)) if file else ""
    return list(paths[1:] if paths and not sys.flags.safe_path and paths[0] in (own, "") else paths)
