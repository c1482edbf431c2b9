"""Draw the pictures of `paceline monitor` and of the report that the README shows.

python docs/img/draw_screens.py

Trains a small model on 3 workers, kills one of them, and draws what the monitor shows of the run as it was at
two thirds, and its report. The monitor is drawn as SVG by rich. The report is a page, which headless Chromium
photographs; without a Chromium (apt-get install chromium) its picture stays as it is, and a line says so.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from torch import nn

import paceline
from paceline.core import journal
from paceline.core.events import StepCommitted
from paceline.monitor.live_view import live_view
from paceline.monitor.run_overview import RunOverview
from paceline.train.state.run_folder import RunFolder

HERE = Path(__file__).parent
MONITOR, REPORT = "monitor.svg", "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
WIDTH, HEIGHT = 1120, 1085
EPOCHS = 12


def train(folder: Path) -> Path:
    """Train with a failure in the middle; return the run's folder."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1536, 16, generator=generator)
    labels = (points[:, :2].prod(1) > 0).long() + (points[:, 2] > 0.5).long()
    training, validation = (points[:1024], labels[:1024]), (points[1024:], labels[1024:])
    config = paceline.TrainConfig(
        workers=3,
        shards=6,
        global_batch=48,
        epochs=EPOCHS,
        progress=False,
        run_dir=str(folder / "20250301-120000-train"),
        fault_tolerance=paceline.FaultTolerance(chaos="kill rank=1 step=90"),
    )
    paceline.Trainer(
        lambda: nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 3)),
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-3),
        config=config,
    ).fit(training, validation)
    return Path(str(config.run_dir))


def draw_monitor(run: Path, target: Path) -> None:
    """Write what `paceline monitor` shows of the run at two thirds of its steps."""
    folder = RunFolder.open(run)
    overview = RunOverview(folder.recorded())
    for event in journal.iterate(folder.journal_file):
        overview.read(event)
        if isinstance(event, StepCommitted) and event.step * 3 >= (overview.total_steps or 0) * 2:
            break
    console = Console(
        file=io.StringIO(), record=True, width=104, color_system="truecolor", force_terminal=True
    )
    console.print(live_view(overview, run.name, running=True))
    console.save_svg(
        str(target),
        title=f"paceline monitor runs/{run.name}",
        unique_id="paceline-monitor",
        # Rich's own frame would have the reader's browser fetch a font.
        code_format=re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL),
    )


def browser() -> str | None:
    """Return headless Chromium, the system's or playwright's."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    kept = Path.home() / ".cache" / "ms-playwright"
    names = ("chrome", "headless_shell", "chrome-headless-shell")
    return next((str(path) for name in names for path in sorted(kept.rglob(name)) if path.is_file()), None)


def draw_report(run: Path, target: Path) -> bool:
    """Photograph the report of the run; False where there is no browser."""
    page = run / "report.html"
    subprocess.run([sys.executable, "-m", "paceline", "report", str(run), "-o", str(page)], check=True)
    program = browser()
    if program is None:
        return False
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [
        f"--window-size={WIDTH},{HEIGHT}",
        f"--screenshot={target.absolute()}",
        page.absolute().as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return True


def main(target: Path = HERE) -> None:
    """Draw both into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder))
        draw_monitor(run, target / MONITOR)
        print(f"wrote {target / MONITOR}")
        if draw_report(run, target / REPORT):
            print(f"wrote {target / REPORT}")
        else:
            print(f"{REPORT} was not drawn, for there is no Chromium: apt-get install chromium")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
