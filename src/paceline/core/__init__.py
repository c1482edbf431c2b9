"""The shared words: errors, events, journal, clock, config, logging and the wire format.

Must not know any other folder of Paceline, and never imports torch.
"""
