"""Ways of one's own to combine gradients: what can be registered, and what is refused."""

from __future__ import annotations

import pytest

from paceline.aggregate import strategy
from paceline.core.errors import UsageError


class Fine:
    def combine(self, context, tensor):
        pass


def test_what_is_registered_is_found_by_name_and_can_be_replaced():
    first, second = Fine(), Fine()
    strategy.register("mine_of_this_test", first)
    assert strategy.find("mine_of_this_test") is first
    strategy.register("mine_of_this_test", second)
    assert strategy.find("mine_of_this_test") is second
    assert "mine_of_this_test" in strategy.registered()
    assert strategy.find("nobody") is None


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
        strategy.register("refused", given)


def test_names():
    with pytest.raises(UsageError, match="cannot name"):
        strategy.register("not a name", Fine())
    with pytest.raises(UsageError, match="of Paceline's own"):
        strategy.register("ring", Fine(), builtin=frozenset({"ring"}))
