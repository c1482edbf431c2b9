"""`paceline.gradient_checkpointing`: drop activations after forward and compute them again for backward."""

from paceline.train.loop.checkpoint_scope import checkpoint_scope as checkpoint_scope
