"""Draw mutants, have them tried in several processes, and count."""

from __future__ import annotations

import hashlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.mutants.operators import Mutant, compiles, mutants_of
from bench.mutants.reach import function_at
from bench.mutants.targets import AREAS, PRELOADED, Area

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant of an area. `by` is empty for one that survived; `excused` is why it is not
    counted."""

    area: str
    mutant: Mutant
    by: str
    seconds: float
    excused: str = ""


@dataclass
class Score:
    """Verdicts, and what they add up to."""

    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def caught(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.by]

    @property
    def equivalent(self) -> list[Verdict]:
        return [one for one in self.verdicts if not one.by and one.excused]

    @property
    def survivors(self) -> list[Verdict]:
        return [one for one in self.verdicts if not one.by and not one.excused]

    @property
    def share(self) -> float:
        """Caught, of those that are not equivalent."""
        counted = len(self.caught) + len(self.survivors)
        return len(self.caught) / counted if counted else 1.0

    def text(self) -> str:
        """The whole result, survivors one line each."""
        lines = [
            f"{len(self.verdicts)} mutants in {self.seconds:.0f} s: {len(self.caught)} caught, "
            f"{len(self.survivors)} survived, {len(self.equivalent)} equivalent: {self.share:.1%}",
        ]
        by = Counter(_catcher(one.by) for one in self.caught)
        lines += [f"  {count:4} caught by {name}" for name, count in by.most_common()]
        counted = [one for one in self.verdicts if one.by or not one.excused]
        for rows in (
            Counter((one.area, bool(one.by)) for one in counted),
            Counter((one.mutant.kind, bool(one.by)) for one in counted),
        ):
            lines.append("")
            for name in sorted({name for name, _ in rows}):
                caught, whole = rows[name, True], rows[name, True] + rows[name, False]
                lines.append(f"  {name:20} {caught:4} of {whole:4}  {caught / whole:6.1%}")
        if self.survivors:
            lines.append("\nsurvivors:")
        for one in sorted(self.survivors, key=lambda one: (one.mutant.path, one.mutant.line)):
            lines.append(shown(one.mutant))
        return "\n".join(lines)


def shown(mutant: Mutant) -> str:
    """A mutant in one line."""
    name = f" [{mutant.name}]" if mutant.name else ""
    return f"{mutant.path}:{mutant.line}:{name} {mutant.kind}: {mutant.change}"


def _catcher(by: str) -> str:
    if by.startswith("simulation"):
        return "the simulation"
    return by.partition("::")[0] if "::" in by else by.partition(":")[0]


def excuses(path: Path = EQUIVALENT) -> dict[tuple[str, str], str]:
    """Why a change makes no difference, by the text of the line and the change."""
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {(one["line"], one["change"]): one["reason"] for one in listed}


def drawn(seed: int, count: int, only: str, root: Path = ROOT) -> list[Mutant]:
    """Draw this number of mutants, from each area by its share. Which are drawn depends on the seed and on
    each mutant's own text: a change elsewhere in the source does not draw others."""
    orders = [_in_drawing_order(seed, area, only, root) for area in AREAS]
    counts = allotted(count, [area.share for area in AREAS], [len(order) for order in orders])
    texts = {path: (root / path).read_text(encoding="utf-8") for area in AREAS for path in area.paths(root)}
    return [
        one
        for order, most in zip(orders, counts, strict=True)
        for one in islice((one for one in order if compiles(one.applied(texts[one.path]))), most)
    ]


def _in_drawing_order(seed: int, area: Area, only: str, root: Path) -> list[Mutant]:
    """List every mutant of an area, in the order in which the seed draws them."""
    found: list[tuple[str, Mutant]] = []
    for path in area.paths(root):
        if only not in path:
            continue
        text = (root / path).read_text(encoding="utf-8")
        seen: Counter[tuple[str, str]] = Counter()
        for mutant in mutants_of(path, text):
            seen[mutant.key] += 1
            name = f"{seed}|{mutant.key}|{seen[mutant.key]}"
            found.append((hashlib.sha256(name.encode()).hexdigest(), mutant))
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


def allotted(count: int, shares: Sequence[int], there: Sequence[int]) -> list[int]:
    """Divide a number by shares, none above what is there; what an area lacks goes to the others."""
    counts = [0] * len(shares)
    for _ in range(min(count, sum(there))):
        # The area that is furthest behind its share gets the next one.
        behind = min(
            (index for index, most in enumerate(there) if counts[index] < most),
            key=lambda index: (counts[index] + 1) / shares[index],
        )
        counts[behind] += 1
    return counts


def area_of(path: str, root: Path = ROOT) -> Area:
    return next(area for area in AREAS if path in area.paths(root))


class _Process:
    """A process that tries mutants (trial.py)."""

    def __init__(self, root: Path, copy: Path, preloaded: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.mutants.trial", str(root), str(copy), *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """`by`: what caught it; empty: nothing did. `reach`: who calls what, where that was asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if answer.get("error"):
            raise RuntimeError(f"a trial failed:\n{answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()


def tried(
    mutants: Sequence[Mutant],
    *,
    jobs: int = 2,
    timeout: float = 60.0,
    root: Path = ROOT,
    areas: Callable[[str], Area] = area_of,
    preloaded: Sequence[str] = PRELOADED,
    excused: dict[tuple[str, str], str] | None = None,
    report: Callable[[Verdict], None] | None = None,
) -> Score:
    """Try all of them. The source as it is must pass first, else nothing can be said about a mutant."""
    score, began = Score(), time.monotonic()
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    texts = {one.path: (root / one.path).read_text(encoding="utf-8") for one in mutants}
    for mutant in mutants:
        waiting.put(mutant)
    reasons = excuses() if excused is None else excused
    trouble: list[BaseException] = []

    def work(process: _Process) -> None:
        try:
            while not trouble:
                mutant = waiting.get_nowait()
                start = time.monotonic()
                text = mutant.applied(texts[mutant.path])
                area = areas(mutant.path)
                callers = _callers(mutant, texts[mutant.path], reach[area.name])
                request = _request(area, root, timeout, callers)
                answer = process.ask({**request, "path": mutant.path, "text": text})
                spent = time.monotonic() - start
                verdict = Verdict(area.name, mutant, answer["by"], spent, reasons.get(mutant.key, ""))
                score.verdicts.append(verdict)
                if report is not None:
                    report(verdict)
        except queue.Empty:
            pass
        except BaseException as error:
            trouble.append(error)

    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        processes = [_Process(root, Path(folder) / str(number), preloaded) for number in range(jobs)]
        try:
            reach = {
                area.name: _whole(area, root, process, 10 * timeout)
                for area, process in zip({areas(one.path) for one in mutants}, cycle(processes), strict=False)
            }
            threads = [threading.Thread(target=work, args=(one,)) for one in processes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                process.close()
    if trouble:
        raise trouble[0]
    score.seconds = time.monotonic() - began
    return score


def _callers(mutant: Mutant, text: str, reach: dict[str, list[str]]) -> list[str] | None:
    """The tests and schedules that can notice it; None: all may."""
    function = function_at(text, mutant.line)
    return None if function is None else reach.get(f"{mutant.path}:{function}", [])


def _request(area: Area, root: Path, timeout: float, callers: Sequence[str] | None = None) -> dict[str, Any]:
    """What is run for a mutant of this area: the callers among its tests and schedules, or all of them."""
    schedules = [f"{workers}:{seed}" for workers, seeds in area.schedules for seed in range(seeds)]
    request: dict[str, Any] = {"files": area.test_paths(root), "schedules": schedules, "timeout": timeout}
    if callers is not None:
        every = set(schedules)
        request["schedules"] = [name for name in callers if name in every]
        request["tests"] = [name for name in callers if name not in every]
    return request


def _whole(area: Area, root: Path, process: _Process, timeout: float) -> dict[str, list[str]]:
    """Who calls what in this area; the source as it is has to pass."""
    answer = process.ask({**_request(area, root, timeout), "reach": True})
    if answer["by"]:
        raise RuntimeError(f"without any change the {area.name} does not pass: {answer['by']}")
    found: dict[str, list[str]] = answer["reach"]
    return found
