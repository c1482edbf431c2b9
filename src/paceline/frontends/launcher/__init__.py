"""`paceline run`: start a script once for every rank, in place of torchrun.

    launch_options        the command line: the launcher's options, the script, and what is the script's
    launch_config         what is started, checked
    launch_program        what each rank runs
    distributed_launcher  the front door
    node_job              the launcher of one node: start, watch, start again, report
      node_meeting        where the launchers of several nodes agree on attempts
      call_relay          what ranks ask of their launcher, answered (their end: joint_calls, launcher_link)
    script_rank           a rank: takes its streams and variables, then runs the script as `__main__`

The launcher itself never imports torch: ranks come from the warm fork server (engines/local).
"""
