"""docs/member.md says what the member machine does."""

from __future__ import annotations

from pathlib import Path

from tests.control import member_page

from paceline.control.member_state import MemberPhase

PAGE = Path(__file__).parent.parent.parent / "docs" / "member.md"


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert member_page.rendered(text) == text, "run: python -m tests.control.member_page docs/member.md"
    assert text.count("<!-- begin table -->") == 1


def test_every_phase_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for phase in MemberPhase:
        assert f"**{phase.value}**" in text
