"""Tracebacks as a front door raises them: the user's frames, and one exception for one error."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest

from paceline.core import config as core_config
from paceline.core.errors import ConfigError, InternalError, RankFailedError, UsageError
from paceline.core.traceback_filter import fold, last_place
from paceline.frontends.error_folding import folding_errors
from paceline.train.callbacks import Callbacks, Observer
from paceline.train.history import History
from paceline.train.settings.train_config import TrainConfig


def users_code(_: object = None) -> None:
    raise KeyError("no such column")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class Broken(Observer):
    def on_end(self, history: History) -> None:
        users_code()


def test_an_error_of_users_code_behind_a_door_has_the_users_frames_alone() -> None:
    @folding_errors
    def door() -> None:
        Callbacks([Broken()]).notify(Observer.on_end, History(total_time=0.0, state_hash=""))

    with pytest.raises(UsageError, match="the observer Broken raised KeyError in on_end") as caught:
        door()
    text = shown(caught.value)
    assert text.count("Traceback") == 2  # where the user's code raised, and what it had called
    assert "src/paceline" not in text
    assert "in users_code" in text


def test_a_coroutine_is_a_door_too() -> None:
    @folding_errors
    async def door() -> None:
        await asyncio.to_thread(core_config.load, TrainConfig, Path("missing.toml"))

    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read") as caught:
        asyncio.run(door())
    text = shown(caught.value)
    assert "src/paceline" not in text
    # The FileNotFoundError is in the message, and no second traceback.
    assert text.count("Traceback") == 1
    assert isinstance(caught.value.__context__, FileNotFoundError)


def test_what_came_from_another_process_is_shown_once_and_can_be_asked_for() -> None:
    error = RankFailedError("rank 1 raised KeyError: 'x'", traceback_text='  File "net.py", line 1, in f')
    error.__cause__ = original = KeyError("x")
    fold(error)
    assert shown(error).count("KeyError") == 1
    assert error.original is original


def test_the_users_own_chain_stays() -> None:
    @folding_errors
    def door() -> None:
        try:
            users_code()
        except KeyError as error:
            raise ValueError("the table is empty") from error

    with pytest.raises(ValueError, match="the table") as caught:
        door()
    assert shown(caught.value).count("Traceback") == 2


def test_a_bug_keeps_its_frames() -> None:
    def buggy(conversion: str) -> None:
        try:
            core_config.load(TrainConfig, {"epochs": conversion})
        except ConfigError as error:
            raise InternalError("broken") from error

    with pytest.raises(InternalError) as caught:
        folding_errors(buggy)("x")
    assert "core/config.py" in shown(caught.value)


def test_frames_of_torchs_calls_are_left_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: object) -> object:
            return users_code(x)  # type: ignore[func-returns-value]

    with pytest.raises(KeyError) as caught:
        folding_errors(Net())(1)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == [
        "forward",
        "users_code",
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            'Traceback:\n  File "a.py", line 1, in f\n    g()\n  File "b.py", line 22, in g\n',
            " at b.py:22 in g",
        ),
        ("no traceback", ""),
    ],
)
def test_the_last_place_of_a_text(text: str, place: str) -> None:
    assert last_place(text) == place
