"""``python -m dcp_rs``: the command line."""

from dcp_rs.cli import main

if __name__ == "__main__":
    main()
