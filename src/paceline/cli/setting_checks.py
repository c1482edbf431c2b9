"""Settings of a run that starts later or elsewhere, checked now: by name, by form, and that their files are
there. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UsageError


def checked_assignments(assignments: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of --set; UsageError for one that assigns nothing."""
    for text in assignments:
        name, equals, _ = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--set {text}: not of the form key=value",
                remedy="write it like --set checkpoint.keep_last=5",
            )
    return tuple(assignments)


def check_settings(assignments: Sequence[str], config: str | None) -> tuple[str, ...]:
    """Refuse what `paceline train` would refuse of --set and --config; return the assignments."""
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile
    from paceline.frontends.overrides import Overrides

    texts = checked_assignments(assignments)
    per_gpu = None if config is None else PerGpuFile.read(config)
    Overrides({}, texts, file=None if per_gpu is not None else config)
    return texts


def check_script(script: str) -> None:
    """Refuse a script that cannot be read."""
    try:
        with open(script, "rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"the script {script} cannot be read: {error.strerror}",
            remedy="give the path of the Python file that trains",
        ) from error
