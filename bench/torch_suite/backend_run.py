"""Run PyTorch's own distributed test suite against one backend, and write the outcome of each test.

python -m bench.torch_suite.backend_run --backend paceline --out result.jsonl [--world-size 3] [--match TEXT]

The suite is `torch.testing._internal.distributed.distributed_test` from the torch wheel. Its tests are
skipped by the backend's name in many places; `WIDENED` and `_register` are everything that lets another name
than "gloo" run them, and no test itself is changed. The suite's list of backends whose profiler events it
compares (PROFILING_SUPPORTED_BACKENDS) stays as it is: a process group in Python cannot record the shapes of
its inputs. The processes of a test are forked from this one, which has torch imported, in place of being
spawned: a test then takes a second and not ten."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

MODULE = "torch.testing._internal.distributed.distributed_test"
PACELINE = "paceline"

# Skip conditions that name Gloo where "a backend for CPU tensors" is meant.
WIDENED = (
    ('BACKEND != "gloo"', 'BACKEND not in ("gloo", "paceline")'),
    ('BACKEND == "gloo"', 'BACKEND in ("gloo", "paceline")'),
    ('require_backend_is_available({"gloo"})', 'require_backend_is_available({"gloo", "paceline"})'),
)


def load_suite(backend: str) -> ModuleType:
    """Load the suite's module under its own name, with its skip conditions widened for Paceline."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    if backend == PACELINE:
        for condition, widened in WIDENED:
            source = source.replace(condition, widened)
        _register()
    module = ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def _register() -> None:
    """Register the backend, and enter it in the suite's tables of what a backend can do: all that Gloo
    can."""
    from torch.testing._internal.common_distributed import DistTestCases

    from paceline.comm.torch_process_group import group_creation  # noqa: F401, once for all that are forked

    for capability in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[capability].add(PACELINE)


def test_class(module: ModuleType) -> type[unittest.TestCase]:
    import torch.multiprocessing

    base: Any = module.TestDistBackend

    class TestForked(base, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:  # noqa: N802
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    TestForked.__qualname__ = TestForked.__name__ = "TestDistBackendForked"
    module.instantiate_parametrized_tests(TestForked)
    return TestForked


class Recorder(unittest.TestResult):
    """Write one JSON line per test as soon as it has ended."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _record(self, test: unittest.TestCase, outcome: str, detail: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self._began, 2)
        line = {"test": name, "outcome": outcome, "seconds": seconds, "detail": detail[-4000:]}
        print(json.dumps(line), file=self._out, flush=True)
        print(f"{outcome:8} {seconds:6.1f} s  {name}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._record(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._record(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--match", default="", help="only tests whose name contains it; several by comma")
    parser.add_argument("--tests", default="", help="a file with one test name per line")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            BACKEND=given.backend,
            WORLD_SIZE=str(given.world_size),
            TEMP_DIR=folder,
            INIT_METHOD="env://",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="90",
            OMP_NUM_THREADS="1",
        )
        for name in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(test_class(load_suite(given.backend)))
        wanted = given.match.split(",") if given.match else [""]
        named = set(Path(given.tests).read_text().split()) if given.tests else None
        tests = [
            test
            for test in suite
            if any(text in test.id() for text in wanted)
            and (named is None or test.id().rsplit(".", 1)[-1] in named)
        ]
        with open(given.out, "a") as out:
            recorder = Recorder(out)
            for test in tests:
                test.run(recorder)  # type: ignore[union-attr]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
