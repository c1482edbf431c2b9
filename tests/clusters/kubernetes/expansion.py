"""What a kubelet makes of $ in commands and variables."""

from __future__ import annotations

import re
from collections.abc import Mapping


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a command, or a variable's value, as a kubelet hands it on: $(NAME) is replaced where
    there is such a variable before, and $$ is one $."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return re.sub(r"\$(\$|\(([^)]*)\))", put, text)
