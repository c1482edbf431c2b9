"""Processes on this machine: a warm fork server, the ranks it forks, and how they ended.

    launch.run(Launch)          the parent's side of one group of ranks: start, collect, judge, clean up
      fork_server_client        this process's fork server: started on first use, shut down at exit
        fork_server             the server process: one thread, preloads modules, forks, reaps and kills ranks
          forked_rank           a rank right after fork: own session, environment, then the entry function
      worker_handle             one rank as its parent sees it; a supervisor starts, adopts and watches them
    engine_messages, rank_call, memfd_pickle    what travels: small messages with descriptors, pickles

An entry is named by "module:function" and every setting is plain data, so nothing here knows what a rank
computes, how ranks communicate, or torch.
"""

from __future__ import annotations

from paceline.engines.local.fork_server_client import shutdown
from paceline.engines.local.launch import Launch, run

__all__ = ["Launch", "run", "shutdown"]
