"""Checkpoints that are there and cannot be read, or were written by another Paceline, are not damaged:
nothing goes back behind them."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.future_versions import from_the_future
from tests.checkpoint.remote_servers import KEEPS_CONNECTIONS
from tests.checkpoint.saving import assert_is, save

from paceline.checkpoint.manifest import UnreadableCheckpointError
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import PlatformError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(CheckpointStore(tmp_path / "run"), step)
    return tmp_path / "run"


def test_an_unknown_format_is_no_damage(run: Path) -> None:
    from_the_future(run, 2)
    (found,) = CheckpointStore(run).verify()
    assert found.kind == "unknown format"
    with pytest.raises(UnreadableCheckpointError, match="paceline-checkpoint-2") as caught:
        CheckpointStore(run).newest_good()
    assert "resume=1 of step 1" in caught.value.remedy
    with pytest.raises(UnreadableCheckpointError, match=r"checkpoint 2 .* cannot be read here"):
        CheckpointStore(run).open(2)
    assert_is(CheckpointStore(run).open(1), 1)


def test_all_of_an_unknown_format_are_listed(run: Path) -> None:
    for version in (1, 2):
        from_the_future(run, version)
    with pytest.raises(UnreadableCheckpointError) as caught:
        CheckpointStore(run).newest_good()
    assert [item.version for item in caught.value.damage] == [2, 1]
    assert CheckpointStore(run).versions() == [1, 2]
    (run / "latest").unlink()
    with pytest.raises(UnreadableCheckpointError):
        CheckpointStore(run).open("latest")


def test_what_is_later_than_asked_for_may_be_of_any_kind(run: Path) -> None:
    """The step of a manifest that cannot be read is not known: it counts."""
    assert_is(CheckpointStore(run).newest_good(at_most_step=1), 1)
    assert CheckpointStore(run).newest_good(at_most_step=0) is None
    from_the_future(run, 1)
    with pytest.raises(UnreadableCheckpointError):
        CheckpointStore(run).newest_good(at_most_step=1)


# Root may read everything, so another user looks.
AS_NOBODY = """
import sys
from paceline.checkpoint.manifest import UnreadableCheckpointError
from paceline.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
try:
    print("found", store.newest_good())
except UnreadableCheckpointError as error:
    print([item.kind for item in error.damage])
    print(error)
"""


@pytest.fixture
def readable_run() -> Iterator[Path]:
    """Below a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for step in (1, 2):
            save(CheckpointStore(Path(folder) / "run"), step)
        for path in [Path(folder) / "run", *(Path(folder) / "run").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Path(folder) / "run"


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize(
    ("what", "mode"), [("v00000002/manifest.json", 0), ("v00000002/state.json", 0), ("v00000002", 0)]
)
def test_a_file_that_another_user_may_not_read(readable_run: Path, what: str, mode: int) -> None:
    (readable_run / what).chmod(mode)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [*nobody, sys.executable, "-c", AS_NOBODY, str(readable_run)],
        env={**os.environ, "PYTHONPATH": str(source), "HOME": "/"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "No module named" in done.stderr or "Permission denied: '" in done.stderr:
        pytest.skip("another user cannot use this Python")
    assert "unreadable" in done.stdout, done.stdout + done.stderr
    assert "cannot be read: Permission denied" in done.stdout
    assert "resume=1 of step 1" in done.stdout


class Forbidding(http.server.SimpleHTTPRequestHandler):
    """A web server that lists its folders and answers for some files with an error."""

    refused: frozenset[str] = frozenset()
    code = 403

    def do_GET(self) -> None:
        if any(self.path.endswith(name) for name in self.refused):
            self.send_error(self.code)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        if any(self.path.endswith(name) for name in self.refused):
            self.send_error(self.code)
        else:
            super().do_HEAD()

    def log_message(self, format: str, *args: object) -> None:
        pass


@KEEPS_CONNECTIONS
@pytest.mark.parametrize("code", [403, 500, 503])
def test_a_server_that_refuses(run: Path, code: int) -> None:
    pytest.importorskip("aiohttp")

    class Handler(Forbidding):
        pass

    Handler.code = code
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(run))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert_is(CheckpointStore(url).newest_good(), 2)
            Handler.refused = frozenset({"v00000002/manifest.json"})
            with pytest.raises(UnreadableCheckpointError, match=str(code)):
                CheckpointStore(url).newest_good()
            Handler.refused = frozenset({"manifest.json"})
            with pytest.raises(UnreadableCheckpointError) as caught:
                CheckpointStore(url).newest_good()
            assert [item.version for item in caught.value.damage] == [2, 1]
            Handler.refused = frozenset({"/"})
            with pytest.raises(PlatformError, match="cannot be listed"):
                CheckpointStore(url).newest_good()
        finally:
            server.shutdown()
            thread.join()


def test_damage_still_falls_back(run: Path) -> None:
    part = run / "v00000002" / "state.json"
    part.write_bytes(part.read_bytes()[:-1])
    assert_is(CheckpointStore(run).newest_good(lambda damage: None), 1)
