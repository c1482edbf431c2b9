"""Parts of a supervisor for its unit tests."""

from tests.elastic.supervisor.shell_parts import killed, parts, shell, signals

__all__ = ["killed", "parts", "shell", "signals"]
