"""Members of a driven machine that keep sending heartbeats."""

from __future__ import annotations

import dataclasses

from tests.elastic.machine.machine_driver import (
    Driven,
)

from paceline.control.messages import Heartbeat
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import Action
from paceline.elastic.machine.machine_events import FromMember, Tick
from paceline.elastic.machine.state import JobPhase


def but(event: FromMember, **changed: float) -> FromMember:
    """The same message with other values."""
    return FromMember(event.member, dataclasses.replace(event.message, **changed))


def keep_beating(job: Driven, seconds: float, **heartbeats: FromMember) -> list[Action]:
    """Time passes; members say the same again, with growing seconds in their phase."""
    told: list[Action] = []
    began = job.now
    while job.now < began + seconds and job.state.phase is JobPhase.RUNNING:
        job.now += 0.25
        for said in heartbeats.values():
            if said.member in job.state.workers:
                assert isinstance(said.message, Heartbeat)
                told += job.tell(but(said, seconds=job.now - began + said.message.seconds))
        due = machine.next_deadline(job.state)
        if due is not None and job.now >= due:
            told += job.tell(Tick())
    return told
