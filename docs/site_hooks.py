"""Hooks of the documentation's site: what lies outside of docs/ is named there, and cannot be a link."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by the text and the path in the repository."""
    depth = page.file.src_uri.count("/")

    def plain(found: re.Match[str]) -> str:
        text, up, path = found.group(1), found.group(2), found.group(3)
        if up.count("../") <= depth:
            return found.group(0)
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(plain, markdown)
