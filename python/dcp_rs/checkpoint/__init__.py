"""Checkpoints in storage: how they are found, opened, streamed, verified and compared."""
