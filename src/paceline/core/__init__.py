"""Foundations of every layer: errors, events, journal, config, logging, the wire format, handshakes, files,
storage.

Must not know any other folder of Paceline, and never imports torch.
"""
