"""Arguments of torch's storage classes that :class:`RsReader` and :class:`RsWriter` accept."""

from __future__ import annotations

from typing import Any

from dcp_rs._warnings import warn_caller

__all__ = ["choose_argument", "warn_ignored"]

_warned: set[tuple[str, str]] = set()


def choose_argument(name: str, value: Any, stock_name: str, stock_value: Any) -> Any:
    """Return the value of an option that torch gives another name.

    Raises:
        ValueError: both are given, and differ; or a number of threads is not positive.
    """
    if value is not None and stock_value is not None and value != stock_value:
        msg = f"{stock_name}={stock_value!r} and {name}={value!r}: they are one option"
        raise ValueError(msg)
    if value is None and name == "threads" and stock_value is not None and stock_value <= 0:
        msg = f"{stock_name}={stock_value!r}: must be a positive integer"
        raise ValueError(msg)
    return stock_value if value is None else value


def warn_ignored(owner: str, name: str, why: str) -> None:
    """Warn, once in this process, of an argument that has no effect."""
    if (owner, name) not in _warned:
        _warned.add((owner, name))
        warn_caller(f"{owner} has no use for {name}: {why}")
