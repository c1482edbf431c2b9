"""Lines of ranks on their way to one output: whole, in order, each with its rank in front."""

from __future__ import annotations

import os

import pytest

from paceline.engines.local.output_relay import OutputPipe, RankOutput, split_lines, write_all


@pytest.mark.parametrize(
    ("data", "lines", "rest"),
    [
        (b"", [], b""),
        (b"a", [], b"a"),
        (b"a\nb\r\nc", [b"a\n", b"b\r\n"], b"c"),
        (b"\n\n", [b"\n", b"\n"], b""),
        (b"10%\r20%\r", [b"10%\r"], b"20%\r"),  # which may be half of a line end
        (b"\r 5%", [b"\r"], b" 5%"),
    ],
)
def test_lines_are_split_at_their_ends(data: bytes, lines: list[bytes], rest: bytes) -> None:
    assert split_lines(data) == (lines, rest)


def test_a_line_without_an_end_is_passed_on_at_last() -> None:
    endless = b"x" * ((1 << 20) + 1)
    assert split_lines(endless) == ([endless], b"")
    assert split_lines(endless[1:]) == ([], endless[1:])


def relayed(pieces: list[bytes], *, shown: bool = True) -> tuple[bytes, RankOutput]:
    """What two pipes of one output make of these pieces, written in turns."""
    reading, target = os.pipe()
    output = RankOutput(3, shown)
    pipes = [OutputPipe(output, target), OutputPipe(output, target)]
    for number, piece in enumerate(pieces):
        os.write(pipes[number % 2].writing, piece)
        assert pipes[number % 2].relay()
    assert pipes[0].relay()  # nothing has come
    for pipe in pipes:
        pipe.close()
        pipe.close()
    os.close(target)
    with os.fdopen(reading, "rb") as file:
        return file.read(), output


def test_pieces_of_two_streams_are_put_together_to_lines() -> None:
    text, output = relayed([b"one ", b"err", b"two\n", b"or\n", b"half"])
    assert text == b"[rank 3] one two\n[rank 3] error\n[rank 3] half\n"
    assert list(output.last_lines) == ["one two", "error", "half"]


def test_output_that_is_not_shown_is_kept_for_a_report() -> None:
    text, output = relayed([b"\xff quiet\n", b"\n", b"y" * 1000 + b"\n"], shown=False)
    assert text == b""
    assert list(output.last_lines) == ["\ufffd quiet", "y" * 400 + "..."]


def test_only_the_last_lines_are_kept() -> None:
    _, output = relayed([b"".join(b"%d\n" % number for number in range(50))])
    assert list(output.last_lines) == [str(number) for number in range(30, 50)]


def test_the_end_of_all_writers_is_noticed() -> None:
    pipe = OutputPipe(RankOutput(0), 1)
    pipe.close_writing()
    assert not pipe.relay()
    pipe.close()


def test_an_output_without_a_reader_is_no_error() -> None:
    reading, target = os.pipe()
    os.close(reading)
    write_all(target, b"lost")
    os.close(target)


def test_a_slow_reader_gets_everything() -> None:
    import threading

    reading, target = os.pipe()
    os.set_blocking(target, False)
    data = os.urandom(1 << 20)
    writer = threading.Thread(target=write_all, args=(target, data))
    writer.start()
    with os.fdopen(reading, "rb") as file:
        assert file.read(len(data)) == data
    writer.join()
    os.close(target)
