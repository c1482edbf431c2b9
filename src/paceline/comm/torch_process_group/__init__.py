"""Paceline as a backend of torch.distributed: a process group of torch's on Paceline's queue, collectives and
transports.

`paceline_group` is what torch calls, `tensor_calls` plans its collectives, `callback_order` gives those of
callbacks their place, `tensor_messages` moves point-to-point messages, `work` is what torch waits for. Must
not know of training: scripts with DDP or FSDP see torch only."""

NAME = "paceline"
