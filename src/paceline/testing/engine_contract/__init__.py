"""The contract of engines: what a run on any engine has to stand, against the real thing.

    cases.check_faults(lab, folder)          # lab: how to break this engine's nodes
    cases.check_stop_and_resume(lab, folder)

A worker and an agent are killed, a node is lost and another added, the run is stopped and resumed on another
number of nodes: the final weights are those of one process each time, every sample was applied once, and
nothing is left running. Workers of all nodes must see the folder of the test.
"""

from paceline.testing.engine_contract.cases import (
    check_caller_killed as check_caller_killed,
    check_faults as check_faults,
    check_stop_and_resume as check_stop_and_resume,
)
from paceline.testing.engine_contract.lab import EngineLab as EngineLab
