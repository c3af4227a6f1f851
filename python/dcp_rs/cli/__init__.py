"""The command line, ``dcp-rs``.

Exit codes: 0 success, 1 damage or a difference found, 2 error, 3 no digests to verify.
"""

from dcp_rs.cli.app import app
from dcp_rs.cli.run import main

__all__ = ["app", "main"]
