"""Options that torch's storage classes give another name."""

from __future__ import annotations

from typing import Any


def choose_argument(name: str, value: Any, stock_name: str, stock_value: Any) -> Any:
    """Return the value of an option that torch gives another name.

    Raises:
        ValueError: both are given, and differ.
    """
    if value is not None and stock_value is not None and value != stock_value:
        msg = f"{stock_name}={stock_value!r} and {name}={value!r}: they are one option"
        raise ValueError(msg)
    return stock_value if value is None else value
