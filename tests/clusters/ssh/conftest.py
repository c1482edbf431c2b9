"""The hash of the run that the tests disturb, as the tests of several hosts have it."""

from __future__ import annotations

from tests.network.conftest import undisturbed as undisturbed
