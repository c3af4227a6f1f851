"""The command line, ``dcp-rs``. Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer."""

from dcp_rs.cli.app import app
from dcp_rs.cli.run import main

__all__ = ["app", "main"]
