"""docs/cli.md is what the commands say, and the pictures of the README are drawn by a script."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

from tests.cli.made_runs import write_run
from tests.train.made_journals import MadeRun

from paceline.cli.main import Commands

DOCS = Path(__file__).parents[2] / "docs"


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_current():
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert page == script(DOCS / "write_cli_page.py").page(), "run python docs/write_cli_page.py"
    assert [name for name in Commands.table if f"\n## paceline {name}\n" not in page] == []
    assert "| `--follow, -f` | Print what comes, until the run ends. |  |" in page
    assert "| `--older-than TIME` |" in page


def test_the_monitor_is_drawn_by_the_script(tmp_path):
    drawing = script(DOCS / "img" / "draw_screens.py")
    run = write_run(tmp_path / "run", MadeRun(5, trouble=0.4).run(), epochs=4)
    drawing.draw_monitor(run, tmp_path / "monitor.svg")
    text = (tmp_path / "monitor.svg").read_text()
    assert "training" in text
    for picture in (tmp_path / "monitor.svg", DOCS / "img" / drawing.MONITOR):
        ElementTree.parse(picture)
        assert "@font-face" not in picture.read_text()  # nothing is fetched by the reader's browser
    assert (DOCS / "img" / drawing.REPORT).read_bytes().startswith(b"\x89PNG")


def test_the_readme_shows_them():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert "docs/img/monitor.svg" in text
    assert "docs/img/report.png" in text
