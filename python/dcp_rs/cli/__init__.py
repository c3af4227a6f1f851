"""The command line, ``dcp-rs``. Exit codes: 0 success, 1 damage or a difference found, 2 error."""

from dcp_rs.cli.app import app
from dcp_rs.cli.run import main

__all__ = ["app", "main"]
