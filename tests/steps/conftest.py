"""The roots of a run."""

import pytest

from support.roots import FolderRoot, StoreRoot


@pytest.fixture(params=["folder", "store"])
def root(request, tmp_path):
    """The root of a run, in a folder and on a store."""
    if request.param == "folder":
        return FolderRoot(tmp_path / "run")
    request.getfixturevalue("no_store_settings")
    return StoreRoot(request.getfixturevalue("server"))
