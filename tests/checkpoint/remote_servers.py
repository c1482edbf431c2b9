"""What servers of remote storage are known to do."""

from __future__ import annotations

import pytest

KEEPS_CONNECTIONS = pytest.mark.leaky("fsspec keeps its thread and its connections until the process ends")
