"""Where a run is, by its path or its URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs.steps.folder_root import FolderRoot
from dcp_rs.steps.root import Root, StepNames
from dcp_rs.steps.store_root import StoreRoot

__all__ = ["root_at"]


def root_at(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | Any | None = None,
    names: StepNames | None = None,
) -> Root:
    """The root at a path, or at a URL. Nothing is looked at yet.

    Raises:
        UnsupportedError: a scheme that is not known, or options for a path of the file system.
    """
    where = location(path)
    # What is secret gets no name here: tools show the variables of a traceback.
    if isinstance(where, Url):
        return StoreRoot(where, StorageOptions.of(storage_options), names)
    options_for(where, StorageOptions.of(storage_options))
    return FolderRoot(where, names)
