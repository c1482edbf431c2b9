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


def folder_of_handed_over_run(assignments: Sequence[str], config: str | None) -> str | None:
    """Return the run's folder of a file of settings: engines choose one where their options lack it, and
    options win over a file. Refuse a version to continue from: each start of a run that is handed over
    continues from the newest one."""
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile
    from paceline.frontends.overrides import PER_GPU, Overrides
    from paceline.train.settings.train_config import TrainConfig

    per_gpu = None if config is None else PerGpuFile.read(config)
    texts = tuple(text for text in assignments if not text.startswith(PER_GPU))
    if per_gpu is not None:
        config = None
        folder = per_gpu.global_settings(None).get("run_dir")
    else:
        folder = Overrides(file=config).apply(TrainConfig()).run_dir
    resume = Overrides({}, texts, file=config).apply(TrainConfig()).resume
    if resume not in (None, "auto"):
        raise UsageError(
            f"resume={resume!r}: each start of a run that is handed over continues from the newest version "
            "in its folder; the engine starts it again where it was lost, and would go back each time",
            remedy="leave it out; `paceline train --resume VERSION` goes back to one",
        )
    return str(folder) if folder else None


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
