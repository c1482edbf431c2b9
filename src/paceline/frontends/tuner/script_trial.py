"""Trials that run a script: `paceline tune script.py`. The script is `__main__` of each trial's process; its
last `paceline.tune.report` is the trial's value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from paceline.core.host import host_name
from paceline.engines.local import script_main
from paceline.frontends.tuner import current_trial
from paceline.frontends.tuner.trial_process import leaving_well
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError

_PLACE = re.compile(r"\{(\w+)\}")


@final
@dataclass(frozen=True)
class ScriptTrial:
    """A script with its arguments, in which `{lr}` stands for the parameter lr."""

    script: str
    arguments: tuple[str, ...] = ()

    def __call__(self, params: Mapping[str, Any]) -> None:
        """Run the script in this process, which ends with it."""
        __tracebackhide__ = True
        arguments = [self._filled(text, params) for text in self.arguments]
        if not os.path.isfile(self.script):
            raise TrialSetupError(
                f"the script {self.script} is not in {os.getcwd()} on {host_name()}",
                remedy="search in a folder that all nodes see under the same path",
            )
        with leaving_well():
            script_main.become_main(self.script, arguments)
        self._check(params)

    def _check(self, params: Mapping[str, Any]) -> None:
        trial = current_trial.current()
        assert trial is not None
        placed = any(name in params for text in self.arguments for name in _PLACE.findall(text))
        if not trial.params_were_read and not placed:
            raise TrialResultError(
                f"{self.script} did not read the parameters of its trial",
                remedy="call paceline.tune.params() in it, or hand them over: "
                "paceline tune SCRIPT ... -- --lr {lr}",
            )
        if not trial.reports:
            raise TrialResultError(
                f"{self.script} reported nothing, so there is no value to search by",
                remedy="call paceline.tune.report(step, value) in it; the last one counts",
            )

    @staticmethod
    def _filled(text: str, params: Mapping[str, Any]) -> str:
        return _PLACE.sub(lambda found: str(params.get(found[1], found[0])), text)
