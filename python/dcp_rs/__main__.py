"""``python -m dcp_rs``, as ``dcp-rs``."""

from dcp_rs.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
