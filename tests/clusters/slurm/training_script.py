"""The contract's run, longer, as a script of `paceline train` and `paceline submit`: training_script.py GATE.
Other packages that the pytest process has are not needed here."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from paceline.testing.engine_contract import run

if __name__ == "__main__":
    config = dataclasses.replace(run.config_of(Path("run")), max_steps=300)
    print("hash", run.fit(config, Path(sys.argv[1])), flush=True)
