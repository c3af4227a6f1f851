"""Saves that are killed, and what a checkpoint is afterwards. ``python -m crash --help``."""
