"""Every test is checked for leaks: what it started must be gone when it ends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from paceline.core import log
from paceline.testing import leaks

_FAILED = pytest.StashKey[bool]()

# So that processes whose parent died are still recognised as ours.
leaks.mark()


def pytest_collection_finish() -> None:
    """What was imported stays; going through it again would stop a test for half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a user's runs keep outside of their folders is kept apart from that of the person who tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a passing test that leaves a thread, a process, a file descriptor, a shared-memory file or the
    rank of a run, which log lines carry, behind.

    `@pytest.mark.leaky("reason")` turns it off. What module and session fixtures hold is not counted.
    """
    before, position = leaks.snapshot(), log.position()
    yield
    # A failed test's traceback keeps its locals alive, and has something more useful to say anyway.
    if request.node.stash.get(_FAILED, False) or request.node.get_closest_marker("leaky"):
        return
    left = leaks.since(before, kept=_fork_server())
    if log.position() != position:
        left.append(f"the log's {log.position()}, which was {position}")
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _fork_server() -> leaks.Allowed:
    """The warm fork server is meant to outlive the call that started it."""
    client = sys.modules.get("paceline.engines.local.fork_server_client")
    if client is None or not client._holder.servers:
        return leaks.Allowed()
    server = client._holder.servers[-1]
    return leaks.Allowed(
        pids=frozenset({server.pid}), descriptors=frozenset({server.control.fileno(), server.watch})
    )
