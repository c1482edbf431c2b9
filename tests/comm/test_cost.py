"""The cost model: sensible choices with a reason, and a file of measured links that may be damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from paceline.comm import algorithms
from paceline.comm.context import DistributedContext
from paceline.comm.cost import (
    Choice,
    LinkCost,
    LinkCosts,
    Situation,
    decide,
    links_file,
    load_links,
    save_links,
)
from paceline.core.errors import UsageError
from paceline.testing.thread_transport import run_ranks

KB, MB = 1 << 10, 1 << 20


def choose(situation: Situation, links: LinkCosts | None = None) -> Choice:
    links = links or LinkCosts()
    return decide(
        situation, {name: algorithms.load(name).cost(situation, links) for name in algorithms.NAMES}, links
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("nbytes", [0, 4, 4 * KB, MB, 100 * MB])
def test_in_shared_memory_direct(nbytes, ranks):
    assert choose(Situation(nbytes, ranks, has_window=True)).algorithm == "direct"


@pytest.mark.parametrize("nbytes", [MB, 25 * MB, 100 * MB])
@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (8, 2), (16, 4)])
def test_several_ranks_per_host_hierarchical(nbytes, ranks, hosts):
    assert choose(Situation(nbytes, ranks, hosts)).algorithm == "hierarchical"


def test_between_hosts_of_one_rank_each():
    """Few rounds where latency counts, neighbours only where handling many messages at once is dear."""
    assert choose(Situation(64 * KB, 256, 256)).algorithm == "tree"
    dear = LinkCosts(overhead=10e-3)
    assert choose(Situation(64 * KB, 16, 16), dear).algorithm == "tree"
    assert choose(Situation(100 * MB, 5, 5), dear).algorithm == "ring"


def test_costs_grow_with_size_and_ranks():
    for name in ("direct", "ring", "tree"):
        cost = algorithms.load(name).cost
        sizes = [cost(Situation(nbytes, 8, 8), LinkCosts()) for nbytes in (0, 64 * KB, MB, 100 * MB)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]
        assert cost(Situation(MB, 16, 16), LinkCosts()) > cost(Situation(MB, 2, 2), LinkCosts())


def test_canonical_and_native_are_never_chosen_by_themselves():
    for situation in (
        Situation(MB, 4, has_window=True),
        Situation(MB, 4, 2),
        Situation(MB, 4, 4, native="gloo"),
    ):
        choice = choose(situation)
        assert choice.algorithm not in ("canonical", "native")
        assert math.isinf(choice.predictions["canonical"])


def test_native_for_tensors_on_gpus():
    assert choose(Situation(MB, 4, 2, native="nccl", on_gpu=True)).algorithm == "native"
    assert choose(Situation(MB, 4, 2, native="nccl")).algorithm != "native"
    assert choose(Situation(MB, 4, 2, native="nccl", on_gpu=True, compressed=True)).algorithm != "native"


def test_the_reason_can_be_read():
    choice = choose(Situation(4096, 4, 2))
    assert choice.reason.startswith(f"{choice.algorithm} for 4096 bytes, 4 ranks on 2 hosts: predicted")
    assert "links: defaults" in choice.reason
    assert "inf" not in choice.reason
    assert choice.seconds == choice.predictions[choice.algorithm] == min(choice.predictions.values())


def test_a_context_explains_its_choice():
    def one(ctx: DistributedContext) -> tuple[Choice, Choice]:
        spread = DistributedContext.from_transport(ctx.transport, hosts=[[0], [1]])
        return ctx.explain_all_reduce(MB), spread.explain_all_reduce(MB)

    for inside, given in run_ranks(2, one):
        assert inside.algorithm == "direct"
        assert "2 ranks on 1 host:" in inside.reason
        assert "2 ranks on 2 hosts" in given.reason


def test_auto_takes_what_was_explained():
    def one(ctx: DistributedContext) -> bool:
        ctx.enable_profiling()
        ctx.all_reduce(torch.ones(1000))
        choice = ctx.explain_all_reduce(4000)
        return list(ctx.get_communication_stats()["operations"]["all_reduce"]) == [choice.algorithm]

    assert all(run_ranks(3, one))


class TestLinks:
    def test_a_fit_goes_through_both_measurements(self):
        link = LinkCost.fit((1000, 3e-5), (1_000_000, 1e-3))
        for nbytes, seconds in ((1000, 3e-5), (1_000_000, 1e-3)):
            assert link.latency + nbytes * link.per_byte == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("small", "large"), [((10, 5e-3), (1000, 1e-3)), ((10, 0.0), (1000, 0.0)), ((10, 1e-9), (1000, 1.0))]
    )
    def test_a_fit_of_noise_stays_positive(self, small, large):
        link = LinkCost.fit(small, large)
        assert link.latency > 0
        assert link.per_byte > 0
        assert math.isfinite(link.latency)
        assert math.isfinite(link.per_byte)

    def test_what_is_saved_is_loaded(self, tmp_path):
        links = LinkCosts(
            LinkCost(1e-5, 1e-10), LinkCost(2e-5, 2e-10), LinkCost(3e-5, 3e-10), 4e-6, "measured here"
        )
        path = tmp_path / "deep" / "links.json"
        assert save_links(links, path) == path
        assert load_links(path) == links
        assert [entry.name for entry in path.parent.iterdir()] == ["links.json"]

    def test_without_a_file_the_defaults(self, tmp_path):
        assert load_links(tmp_path / "none.json") == LinkCosts()

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"{}",
            b'{"window": 3}',
            b"\xff\xfe\x00",
            b'{"window": {"latency": "x"}}',
        ],
    )
    def test_a_damaged_file_is_named_with_what_to_do(self, tmp_path, content):
        path = tmp_path / "links.json"
        path.write_bytes(content)
        with pytest.raises(UsageError, match="damaged") as caught:
            load_links(path)
        assert str(path) in str(caught.value)
        assert "paceline bench comm" in caught.value.remedy

    @pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
    def test_values_that_are_no_costs_are_refused(self, tmp_path, value):
        plain = LinkCosts().to_plain()
        plain["window"]["per_byte"] = value
        path = tmp_path / "links.json"
        path.write_text(json.dumps(plain))
        with pytest.raises(UsageError):
            load_links(path)

    def test_where_the_file_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PACELINE_LINKS", str(tmp_path / "mine.json"))
        assert links_file() == tmp_path / "mine.json"
        monkeypatch.delenv("PACELINE_LINKS")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert links_file() == tmp_path / "paceline" / "links.json"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert links_file() == Path(tmp_path) / ".cache" / "paceline" / "links.json"

    def test_saved_links_change_the_choice_of_a_context(self, monkeypatch, tmp_path):
        """Shared memory that is dearer than messages would be: strange, but measured is measured."""
        monkeypatch.setenv("PACELINE_LINKS", str(tmp_path / "links.json"))
        save_links(LinkCosts(window=LinkCost(1.0, 1.0), source="a strange machine"))
        for choice in run_ranks(2, lambda ctx: ctx.explain_all_reduce(MB)):
            assert choice.algorithm in ("ring", "tree")
            assert "a strange machine" in choice.reason
