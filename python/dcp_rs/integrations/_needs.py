"""What an integration says where its framework is not installed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["framework"]


def framework(name: str, package: str) -> ModuleType:
    """The module ``name``.

    Raises:
        ImportError: it is not there; the message says what to install.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".", maxsplit=1)[0] != error.name.split(".")[0]:
            raise
        msg = f"this part of dcp_rs works with {name.split('.', maxsplit=1)[0]}, which is not installed: pip install {package}"
        raise ModuleNotFoundError(msg, name=error.name) from error
