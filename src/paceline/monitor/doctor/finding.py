"""What one check of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

DoctorVerdict = Literal["ok", "warning", "wrong"]


@final
@dataclass(frozen=True)
class DoctorFinding:
    """One line of `paceline doctor`. `remedy`: what to do about it; never empty unless all is well."""

    topic: str
    verdict: DoctorVerdict
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> DoctorFinding:
    return DoctorFinding(topic, "ok", text)


def warning(topic: str, text: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(topic, "warning", text, remedy)


def wrong(topic: str, text: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(topic, "wrong", text, remedy)
