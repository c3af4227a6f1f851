"""Checkpoints and runs on file systems that behave unlike a local disk. See ``make test-fs``."""
