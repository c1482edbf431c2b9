"""The lowest layer: errors, events, journal, config, logging, the wire format, handshakes, files, storage.
Each module is used by some layer above it, few by all of them.

Must not know any other folder of Paceline, and never imports torch.
"""
