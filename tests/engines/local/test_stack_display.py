"""Stacks as text."""

from __future__ import annotations

from paceline.engines.local import stack_display

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/home/user/train.py", line 12 in step
  File "/home/user/train.py", line 30 in train
  File "/x/paceline/frontends/rank_main.py", line 30 in main
  File "/x/paceline/engines/local/forked_rank.py", line 90 in _work
  File "/x/paceline/engines/local/forked_rank.py", line 70 in run
"""


def test_the_current_threads_frames_without_the_entry_and_below():
    assert stack_display.frames(DUMP) == ["/home/user/train.py:12 in step", "/home/user/train.py:30 in train"]


def test_the_main_thread_whichever_got_the_signal():
    other = DUMP.replace("Current thread", "Thread").replace(
        "Thread 0x00007f0000000001", "Current thread 0x01"
    )
    assert stack_display.frames(other) == stack_display.frames(DUMP)
    # Of a crash the thread that crashed.
    crash = "Fatal Python error: Segmentation fault\n\n" + other
    assert stack_display.frames(crash) == ["/lib/threading.py:320 in wait"]


def test_a_script_begins_with_its_own_frame():
    started = """  File "<frozen runpy>", line 88 in _run_code
  File "/x/paceline/engines/local/script_main.py", line 52 in become_main
  File "/x/paceline/frontends/"""
    assert stack_display.frames(DUMP.replace('  File "/x/paceline/frontends/', started)) == (
        stack_display.frames(DUMP)
    )


def test_a_process_that_has_only_begun_has_no_frames():
    entry = '  File "/x/paceline/engines/local/forked_rank.py", line 70 in run\n'
    assert stack_display.frames("Current thread 0x01 (most recent call first):\n" + entry) == []


def test_deep_stacks_keep_both_ends():
    deep = "".join(f'  File "f.py", line {number} in f\n' for number in range(20))
    found = stack_display.frames("Current thread 0x01 (most recent call first):\n" + deep)
    assert found[0] == "f.py:0 in f"
    assert found[3] == "12 more"
    assert found[-1] == "f.py:19 in f"
    assert len(found) == 9


def test_no_dump_no_frames():
    assert stack_display.frames("") == []


def test_ranks_at_the_same_place_share_an_entry():
    text = stack_display.describe_stacks({2: ["a.py:1 in f"], 0: ["a.py:1 in f"], 1: []})
    assert text == "  ranks 0 and 2: a.py:1 in f\n  rank 1: no Python code was running"
