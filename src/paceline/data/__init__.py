"""Who reads which sample: permutations, virtual shards, positions.

Must not know checkpoint, nor what is learned from the samples.
"""
