"""Imports of frameworks, with an error that says what to install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def framework(name: str, package: str) -> ModuleType:
    """Import a module of a framework.

    Raises:
        ImportError: it is not installed. The message says what to install.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        top, _, _ = name.partition(".")
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        msg = f"this part of dcp_rs works with {top}, which is not installed: pip install {package}"
        raise ModuleNotFoundError(msg, name=error.name) from error
