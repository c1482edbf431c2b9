"""The bar of a run where it is shown: on the last line of a terminal, or in the output of a notebook's cell.

On a terminal all lines but the last scroll (the scroll region that terminals have since the VT100), so what
the program, its workers or any other process print goes above the bar and cannot tear it. In a notebook it is
one display that is updated in place; prints have their own outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, final

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, ProgressColumn, Task, TextColumn
from rich.text import Text

# Columns: the text left and right of the bar, and the limits of the bar itself.
_TEXT_WIDTH = 78
_BAR_LEAST = 8
_BAR_MOST = 36
_STYLES = ("cyan", "green", "magenta", "dim")
_LEAST_HEIGHT = 3  # of a terminal that can do without its last line
_KEPT_LINES = 200  # in the output of a cell


@final
@dataclass(frozen=True)
class BarFigures:
    """What a bar shows now. `total` is None where the end is not known."""

    title: str
    done: int
    total: int | None
    steps: str
    parts: tuple[str, ...]


class ProgressBar(Protocol):
    """A bar with lines of text above it."""

    def draw(self) -> None:
        """Show the figures as they are now."""

    def say(self, text: str) -> None:
        """Add a line above the bar."""

    def close(self, last: str) -> None:
        """Leave the bar as it is now behind, and a last line where there is one."""


def choose_bar(console: Console, figures: Callable[[], BarFigures], *, own: bool) -> ProgressBar | None:
    """Return the bar for a console; None where lines have to do. `own`: the console is this process's stderr,
    so that in a notebook its cell is the better place."""
    display = notebook_display() if own else None
    if display is not None:
        return NotebookBar(display, figures)
    tall = console.size.height >= _LEAST_HEIGHT
    return (
        TerminalBar(console, figures)
        if console.is_terminal and not console.is_dumb_terminal and tall
        else None
    )


@final
class TerminalBar:
    """Draws on the last line of a terminal, outside of the region that scrolls."""

    def __init__(self, console: Console, figures: Callable[[], BarFigures]) -> None:
        self._console, self._figures = console, figures
        self._bars = Bars(
            TextColumn("{task.description}", style="bold"),
            BarColumn(
                bar_width=max(_BAR_LEAST, min(_BAR_MOST, console.width - _TEXT_WIDTH)),
                complete_style="cyan",
                finished_style="green",
                pulse_style="cyan",
            ),
            TextColumn("{task.fields[steps]}"),
            _Figures(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bars.add_task("", steps="", figures=())
        self._height = 0
        self.draw()

    def draw(self) -> None:
        height = self._console.size.height
        # The line feed makes room where the cursor is on the last line; setting a region moves the cursor.
        region = f"\n\x1b7\x1b[1;{height - 1}r\x1b8\x1b[1A" if height != self._height else ""
        self._height = height
        # One write: another process that prints comes before or after it.
        self._write(f"{region}\x1b7\x1b[{height};1H\x1b[2K{self._line()}\x1b8")

    def say(self, text: str) -> None:
        self._print(text)
        self.draw()

    def close(self, last: str) -> None:
        self._write(f"\x1b7\x1b[r\x1b[{self._height};1H\x1b[2K\x1b8{self._line()}\n")
        if last:
            self._print(last)

    def _line(self) -> str:
        now = self._figures()
        self._bars.update(
            self._task,
            completed=now.done,
            total=now.total,
            description=now.title,
            steps=now.steps,
            figures=now.parts,
        )
        with self._console.capture() as captured:
            self._console.print(self._bars)
        return captured.get().partition("\n")[0]

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


@final
class _Figures(ProgressColumn):
    """Loss, speed, workers and time left; cut at the end where it does not fit, never wrapped."""

    def render(self, task: Task) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for index, part in enumerate(task.fields["figures"]):
            text.append("  " if index else "")
            text.append(part, style=_STYLES[min(index, len(_STYLES) - 1)])
        return text


@final
class NotebookBar:
    """One output of the cell, updated in place. `display` is IPython's function."""

    def __init__(self, display: Callable[..., Any], figures: Callable[[], BarFigures]) -> None:
        self._figures = figures
        self._lines: list[str] = []
        self._handle = display(self._content(), raw=True, display_id=True)

    def draw(self) -> None:
        self._handle.update(self._content(), raw=True)

    def say(self, text: str) -> None:
        self._lines = [*self._lines, text][-_KEPT_LINES:]
        self.draw()

    def close(self, last: str) -> None:
        self.say(last) if last else self.draw()

    def _content(self) -> dict[str, str]:
        now = self._figures()
        steps = "  ".join(part for part in (now.steps, *now.parts) if part)
        known = "" if now.total is None else f' value="{now.done}" max="{now.total}"'
        above = escape("\n".join(self._lines))
        html = (
            f'<pre style="margin:0">{above}</pre><div style="font-family:monospace">{escape(now.title)} '
            f'<progress{known} style="width:16em;vertical-align:middle"></progress> {escape(steps)}</div>'
        )
        return {"text/html": html, "text/plain": "\n".join([*self._lines, f"{now.title}  {steps}"])}


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` where this process is the kernel of a notebook; imports nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    found: Callable[..., Any] | None = getattr(sys.modules.get("IPython.display"), "display", None)
    return found
