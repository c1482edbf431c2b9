"""Read what a ResourceQuota says when it refuses a pod. Pure functions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from paceline.core.errors import PacelineError, ResourceError

_EXCEEDED: Final = "exceeded quota"
_UNBOUNDED: Final = "failed quota"  # it counts limits.cpu, say, and the pod names none
_PER_POD: Final = "usage per"  # of a LimitRange
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)([num]|[kKMGTPE]i?|)")
_SMALL: Final = {"m": 3, "u": 6, "n": 9}
_POWERS: Final = " kMGTPE"


def is_quota(told: str) -> bool:
    """Return whether the text is the refusal of a ResourceQuota or a LimitRange."""
    return _EXCEEDED in told or _UNBOUNDED in told or _PER_POD in told


def never_fits(told: str) -> bool:
    """Return whether a quota refuses a pod however little else is there: the pod alone asks for more than the
    quota has, or does not say how much it takes."""
    if _UNBOUNDED in told or _PER_POD in told:
        return True
    limits = _amounts(told, "limited")
    asked = _amounts(told, "requested")
    return any(amount > limits[name] for name, amount in asked.items() if name in limits)


def quota_error(told: str, **facts: object) -> PacelineError:
    """Return the error of a quota that lets an object not be made."""
    if _UNBOUNDED in told:
        remedy = (
            "give cpus= and memory=, or have a LimitRange made in the namespace that gives pods the limits "
            "which the quota counts"
        )
    else:
        remedy = (
            "ask for fewer nodes, CPUs, memory or GPUs, delete what is no longer used "
            "(kubectl get resourcequota), or have the quota raised"
        )
    return ResourceError(f"the namespace's quota does not allow it: {told}", remedy=remedy, **facts)


def _amounts(told: str, part: str) -> dict[str, Fraction]:
    """Read "requested: pods=1,requests.cpu=500m, used: ..."; what is no quantity is left out."""
    found = re.search(rf"{part}: (\S+)", told)
    amounts: dict[str, Fraction] = {}
    for pair in found[1].rstrip(",").split(",") if found else ():
        name, _, text = pair.partition("=")
        if match := _AMOUNT.fullmatch(text):
            amounts[name] = Fraction(match[1]) * _factor(match[2])
    return amounts


def _factor(unit: str) -> Fraction:
    if unit in _SMALL:
        return Fraction(1, 10 ** _SMALL[unit])
    base = 1024 if unit.endswith("i") else 1000
    return Fraction(base ** _POWERS.index(unit[:1].replace("K", "k") or " "))
