"""Counts agree with their nouns in what commands print: "1 step", "2 steps"."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest

from paceline.cli import audit, simulate, verify
from paceline.core.errors import PacelineError
from paceline.elastic.simulation import campaign
from paceline.elastic.simulation.campaign import Campaign
from paceline.engines.local import fork_server_client, launch
from paceline.monitor import progress
from paceline.monitor.audit import AuditResult
from paceline.monitor.audit_receipts import ReceiptSummary
from paceline.train.callbacks import RunInfo
from paceline.train.loop.recompute import VerifiedRun
from paceline.train.settings.train_config import TrainConfig

_NOUNS = (
    "decision|event|fault|job|rank|receipt|repair|restart|sample|schedule|shard|shard result|step|view|worker"
)


def agrees(text: str) -> bool:
    """Whether each 1 has a noun for one, and each 2 a noun for several."""
    noun = rf"(?:audited |lost )?(?:{_NOUNS})"
    return not re.search(rf"(?<![\d.,])1 {noun}s\b|(?<![\d.,])2 {noun}\b(?! result)|\b1 were|\b2 was", text)


@pytest.mark.parametrize("wrong", ["all 1 steps", "2 step", "1 audited steps", "; 1 were lost"])
def test_what_does_not_agree_is_found(wrong: str):
    assert not agrees(wrong)


@pytest.mark.parametrize("number", [1, 2])
class TestCounts:
    @pytest.mark.parametrize("complete", [True, False])
    def test_verify(self, number: int, complete: bool, capsys):
        verify.print_verified(VerifiedRun(number, complete, ()))
        out = capsys.readouterr().out
        assert agrees(out)
        assert {1: "step: the same bits", 2: "2 steps: the same bits"}[number] in out

    def test_simulate(self, number: int):
        counts: Any = dict.fromkeys(("schedules", "events", "decisions", "views", "finished"), number)
        text = simulate.text(Campaign(number, 1, 1, seconds=1.0, faults=Counter(crash=1), **counts))
        assert agrees(text)
        assert {1: "1 schedule of 1 worker in", 2: "2 schedules of 2 workers in"}[number] in text

    def test_a_replay(self, number: int, monkeypatch, capsys):
        outcome = dataclasses.replace(
            campaign.run(3, 2), events=number, views=number, faults=campaign.run(3, 2).faults[:1] * number
        )
        monkeypatch.setattr(campaign, "run", lambda *args, **more: outcome)
        assert simulate.replay_schedule(3, number, False, False) == 0
        out = capsys.readouterr().out
        assert agrees(out)
        assert {1: "1 worker: 1 fault\n", 2: "2 workers: 2 faults\n"}[number] in out

    def test_audit(self, number: int):
        found = AuditResult(
            wrong=(),
            notes=(),
            steps=number,
            redone=number,
            restarts=number,
            epochs=(),
            size=number,
            samples=number,
            skipped=0,
            order="",
            enumerated=False,
            receipts=ReceiptSummary(number, number, number, number, 0),
            views=number,
            repairs=number,
            repair_seconds=(),
            lost_workers=number,
            supervisors=1,
            hashes=dict.fromkeys(range(number), "h"),
            shard_hashes=number,
            samples_agreed=number,
        )
        text = "\n".join(line for _, line in audit.summary_lines(found))
        assert agrees(text)
        assert {1: "1 audited step, 1 shard\n", 2: "2 audited steps, 2 shards\n"}[number] in text

    def test_the_first_line_of_progress(self, number: int):
        config = TrainConfig(global_batch=8)
        text = progress.opening_line(
            RunInfo(config=config, workers=number, total_steps=number, samples=number, run_dir=None)
        )
        assert agrees(text)
        assert {1: "on 1 sample with 1 worker", 2: "on 2 samples with 2 workers"}[number] in text

    def test_ranks_that_cannot_be_started(self, number: int, monkeypatch):
        def refuse(*args: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(launch, "RankGroup", refuse)
        monkeypatch.setattr(fork_server_client, "on_server", lambda start: start(None))
        with pytest.raises(PacelineError) as caught:
            launch.run(launch.Launch("tests:none", print, workers=number))
        assert {1: "1 rank cannot", 2: "2 ranks cannot"}[number] in str(caught.value)
