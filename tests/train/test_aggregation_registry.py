"""Ways of one's own to combine gradients: what can be registered, and what is refused."""

from __future__ import annotations

import pytest

from paceline.core.errors import UsageError
from paceline.train.step import aggregation_registry


class Fine:
    def combine(self, context, tensor):
        pass


def test_what_is_registered_is_found_by_name_and_can_be_replaced():
    first, second = Fine(), Fine()
    aggregation_registry.register("mine_of_this_test", first)
    assert aggregation_registry.find("mine_of_this_test") is first
    aggregation_registry.register("mine_of_this_test", second)
    assert aggregation_registry.find("mine_of_this_test") is second
    assert "mine_of_this_test" in aggregation_registry.registered()
    assert aggregation_registry.find("unknown") is None


class NoCombine:
    pass


class OtherArguments:
    def combine(self, tensor):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Fine, "the class Fine itself"),
        (NoCombine(), "has no method combine"),
        (OtherArguments(), r"cannot be called with \(context, tensor\)"),
    ],
)
def test_what_cannot_combine_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        aggregation_registry.register("refused", given)


def test_names():
    with pytest.raises(UsageError, match="cannot name"):
        aggregation_registry.register("not a name", Fine())
    with pytest.raises(UsageError, match="of Paceline's own"):
        aggregation_registry.register("ring", Fine(), builtin=frozenset({"ring"}))
