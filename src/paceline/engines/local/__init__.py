"""Processes on this machine: a warm fork server, the ranks it forks, and what became of them.

    launch.run(Launch)          the parent's side of one group of ranks: start, collect, judge, clean up
      client                    this process's fork server: started on first use, shut down at exit
        server -> fleet         the fork server: one thread, preloads modules, forks, reaps, kills
          child                 a rank right after fork: own session, surroundings, then the entry function
    protocol, payload, call     what travels: small messages with descriptors, pickles in memory files

An entry is named by "module:function" and every setting is plain data, so nothing here knows what a rank
computes, how ranks communicate, or torch.
"""

from __future__ import annotations

from paceline.engines.local.client import shutdown
from paceline.engines.local.launch import Launch, run

__all__ = ["Launch", "run", "shutdown"]
