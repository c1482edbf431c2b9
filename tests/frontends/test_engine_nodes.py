"""What a run says where its agents cannot be ended."""

from __future__ import annotations

from paceline.core.errors import PlatformError, UnavailableError
from paceline.frontends.engine_nodes import unsure_end


def test_what_is_left_is_named_with_the_command_that_removes_it():
    error = UnavailableError("the server is away", remedy="kubectl -n ml delete job/train-3fa2c1")
    error.add_note("still there: job/train-3fa2c1 in namespace ml")
    assert unsure_end("kubernetes", error) == (
        "whether the agents on kubernetes have ended is not known: the server is away; still there: "
        "job/train-3fa2c1 in namespace ml; try: kubectl -n ml delete job/train-3fa2c1"
    )
    for other in (PlatformError("away"), OSError("away")):
        assert unsure_end("mpi", other).endswith("away; see what still runs there")
