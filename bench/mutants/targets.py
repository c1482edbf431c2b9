"""What is mutated, and which tests are expected to notice. A file that moves is one line here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCHEDULES = ((8, 70), (3, 30), (2, 20), (5, 30))
"""(workers, seeds 0 to n - 1) that are simulated on a mutant that no test noticed."""

ELASTIC_TESTS = ("tests/elastic/machine",)
NOT_RUN = ("test_machine_page.py", "test_purity.py")
"""Tests that compare text: any change of the machine's table would differ from the page that is drawn."""

SLOW = (
    "test_a_heartbeat_looks_at_no_other_worker",
    "test_who_has_the_shards_of_many_has_the_time_of_many",
    "test_a_worker_whose_interpreter_is_held_has_the_time_of_its_phase",
    "test_all_stopped_for_ever_are_replaced_in_the_end",
    "test_after_a_restart_members_that_stay_stopped_together_are_replaced_in_the_end",
    "test_on_the_way_to_a_boundary_who_goes_from_shard_to_shard_is_not_late",
)
"""Tests that take most of a second or more: they are not run for a mutant."""


@dataclass(frozen=True)
class Area:
    """Files and the fast tests that cover them; either may be a folder. `share`: how many of 300 mutants are
    drawn from them, so that a small area is examined as closely as a large one."""

    name: str
    share: int
    files: tuple[str, ...]
    tests: tuple[str, ...]
    schedules: tuple[tuple[int, int], ...] = ()
    left_out: tuple[str, ...] = ()

    def paths(self, root: Path) -> list[str]:
        """List the mutated files, as paths from the root."""
        return _expanded(root, self.files, "*.py", self.left_out)

    def test_paths(self, root: Path) -> list[str]:
        """List the files of tests, as paths from the root."""
        return _expanded(root, self.tests, "test_*.py", NOT_RUN)


def _expanded(root: Path, names: tuple[str, ...], pattern: str, left_out: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for name in names:
        here = root / name
        if not here.exists():
            raise LookupError(f"there is no {name}: see bench/mutants/targets.py")
        files = sorted(here.glob(pattern)) if here.is_dir() else [here]
        found += [str(file.relative_to(root)) for file in files if file.name not in left_out]
    return found


AREAS = (
    Area(
        "deciding machine",
        120,
        ("src/paceline/elastic/machine",),
        ELASTIC_TESTS,
        SCHEDULES,
        # The invariants that tests and the simulation judge by, values that a user
        # sets, and what has its own area.
        left_out=("__init__.py", "invariants.py", "settings.py", "shard_assignment.py"),
    ),
    Area(
        "member machine",
        70,
        (
            "src/paceline/control/member_machine.py",
            "src/paceline/control/member_shell_rules.py",
            "src/paceline/control/member_state.py",
        ),
        (
            "tests/control/test_member_machine.py",
            "tests/control/test_member_machine_rare.py",
            "tests/control/test_member_machine_random.py",
            "tests/control/test_member_shell_rules.py",
        ),
        SCHEDULES,
    ),
    Area(
        "assignment of shards",
        35,
        ("src/paceline/elastic/machine/shard_assignment.py",),
        (
            "tests/elastic/machine/test_shard_assignment.py",
            "tests/elastic/machine/test_assignment_by_speed.py",
        ),
        SCHEDULES,
    ),
    Area(
        "slices of a batch",
        30,
        ("src/paceline/data/batch_plan.py",),
        ("tests/data/test_batch_plan.py",),
    ),
    Area(
        "canonical order",
        45,
        (
            "src/paceline/comm/reduction_order.py",
            "src/paceline/train/step/partial_sums.py",
            "src/paceline/comm/collectives/shard_sums.py",
        ),
        (
            "tests/comm/test_reduction_order.py",
            "tests/train/step/test_partial_sums.py",
            "tests/comm/collectives/test_shard_sums.py",
        ),
    ),
)

PRELOADED = ("pytest", "_pytest.python", "hypothesis", "torch")
"""What tests import and no mutant changes."""
