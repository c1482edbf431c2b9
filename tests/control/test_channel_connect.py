"""Dialing a port of this machine at which nothing listens."""

from __future__ import annotations

import socket

import pytest

from paceline.control import channel


def test_a_socket_that_reaches_itself_is_no_peer(monkeypatch):
    """The kernel may choose the very port that is dialed for the dialing socket: it is connected to itself
    then, and a process that wants to listen there cannot."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    connect = socket.create_connection
    monkeypatch.setattr(
        socket,
        "create_connection",
        lambda where, timeout: connect(where, timeout, source_address=where),
    )
    with pytest.raises(ConnectionRefusedError, match="nothing listens there"):
        channel.connect(address, 5.0)
    with socket.create_server(address) as again:
        assert again.getsockname() == address
