"""Errors of the engine in the words of the front door that was used: a user who sets `batch_size` reads about
`batch_size`, and not about settings of TrainConfig that cannot be set there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.core.errors import PacelineError, RankFailedError


@contextmanager
def in_words_of(words: Mapping[str, str]) -> Iterator[None]:
    """Replace the engine's words in an error of the block; a word that is a name is replaced as a whole.

    Where the text shows lines of the user's code only phrases are replaced: names may be the user's there.
    """
    phrases = {word: own for word, own in words.items() if " " in word}
    try:
        yield
    except PacelineError as error:
        error.message, error.remedy = translated(error.message, words), translated(error.remedy, words)
        if isinstance(error, RankFailedError):
            error.traceback_text = translated(error.traceback_text, phrases)
        if notes := getattr(error, "__notes__", None):
            error.__notes__ = [translated(note, phrases if "\n" in note else words) for note in notes]
        raise


def translated(text: str, words: Mapping[str, str]) -> str:
    """Return the text with other words, none of which is replaced again."""
    if not words:
        return text
    names = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])(?:{names})(?!\w)", lambda found: words[found[0]], text)
