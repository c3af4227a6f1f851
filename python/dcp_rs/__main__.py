"""``dcp-rs`` and ``python -m dcp_rs``: the command line, or what to install for it."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    try:
        from dcp_rs import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.stderr.write(f"dcp-rs: the command line needs {error.name}: pip install 'dcp-rs[cli]'\n")
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
