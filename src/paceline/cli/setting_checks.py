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


def options_of_file(config: str | None) -> list[str]:
    """Return --run-dir and --resume for what a file of settings says of them. Engines give both to the run's
    command where its options lack them, and options win over a file."""
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile
    from paceline.frontends.overrides import Overrides
    from paceline.train.settings.train_config import TrainConfig

    if config is None:
        return []
    per_gpu = PerGpuFile.read(config)
    if per_gpu is not None:
        folder, resume = per_gpu.global_settings(None).get("run_dir"), None
    else:
        meant = Overrides(file=config).apply(TrainConfig())
        folder, resume = meant.run_dir, meant.resume
    words = [] if not folder else ["--run-dir", str(folder)]
    return words if resume is None else [*words, "--resume", str(resume)]


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
