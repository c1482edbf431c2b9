"""Whether a worker would compute the same bits as the others. Must not know what follows if it would not."""

from __future__ import annotations

from typing import final

from paceline.core.control.messages import Hello


@final
class Likeness:
    """`fingerprint` and `model` are those of the first worker that came; None: none has."""

    def __init__(self, fingerprint: dict[str, str] | None, model: str, *, exact: bool) -> None:
        self.fingerprint = fingerprint
        self.model = model
        self._exact = exact

    def difference(self, hello: Hello) -> str:
        """In exact mode: what this worker has that the first one had not, in a sentence."""
        if self.fingerprint is None:
            self.fingerprint, self.model = dict(hello.fingerprint), hello.model
            return ""
        if not self._exact:
            return ""
        found = [
            f"{name} is {hello.fingerprint.get(name, 'missing')!r} instead of "
            f"{self.fingerprint.get(name, 'missing')!r}"
            for name in sorted(self.fingerprint.keys() | hello.fingerprint.keys())
            if hello.fingerprint.get(name) != self.fingerprint.get(name)
        ]
        if hello.model != self.model:
            found.append("its model has other initial weights or names")
        if not found:
            return ""
        who = f"rank {hello.slot} on {hello.hostname}"
        return f"{who} would not compute the same bits as the others: {'; '.join(found)}"
