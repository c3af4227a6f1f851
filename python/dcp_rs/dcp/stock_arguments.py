"""The arguments of torch's storage classes, where these classes are put in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_rs._warnings import warn_caller
from dcp_rs.errors import UnsupportedError

__all__ = ["STOCK_COPY_AHEAD", "judge_writer", "one_of", "say_ignored"]

#: The default of torch's ``FileSystemWriter(per_thread_copy_ahead=)``.
STOCK_COPY_AHEAD = 10_000_000

_said: set[tuple[str, str]] = set()


def one_of(name: str, value: Any, stock_name: str, stock_value: Any) -> Any:
    """The value of an option that has a name here and one in torch.

    Raises:
        ValueError: both are given, and differ; or a number of threads that is none.
    """
    if value is not None and stock_value is not None and value != stock_value:
        msg = f"{stock_name}={stock_value!r} and {name}={value!r}: they are one option"
        raise ValueError(msg)
    if value is None and name == "threads" and stock_value is not None and stock_value <= 0:
        msg = f"{stock_name}={stock_value!r}: must be a positive integer"
        raise ValueError(msg)
    return stock_value if value is None else value


def say_ignored(owner: str, name: str, why: str) -> None:
    """Warns, once in this process, of an argument that has no meaning here. The warning is of the line that calls the constructor."""
    if (owner, name) not in _said:
        _said.add((owner, name))
        warn_caller(f"{owner} has no use for {name}: {why}")


def judge_writer(
    path: Any, extensions: Sequence[Any] | None, single_file_per_rank: bool, copy_ahead: int
) -> None:
    """Looks at the arguments of torch's ``FileSystemWriter`` that have no meaning here.

    Raises:
        UnsupportedError: extensions: they change what is stored.
    """
    if extensions:
        names = ", ".join(type(extension).__name__ for extension in extensions)
        msg = f"RsWriter cannot apply _extensions ({names}): the data would be stored without them"
        raise UnsupportedError(msg, path=path)
    if not single_file_per_rank:
        say_ignored(
            "RsWriter",
            "single_file_per_rank=False",
            "an index says what lies where, not the names of files",
        )
    if copy_ahead != STOCK_COPY_AHEAD:
        say_ignored(
            "RsWriter", "per_thread_copy_ahead", "max_inflight_bytes bounds what is copied ahead"
        )
