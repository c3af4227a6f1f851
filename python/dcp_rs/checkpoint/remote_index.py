"""An index for data that is on a store already: read in place, and stored beside it by one conditional request."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._url import StorageOptions, Url, options_for
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file, payload
from dcp_rs.checkpoint.wanted_save import WantedSave
from dcp_rs.errors import CheckpointExistsError

__all__ = ["index_on_store"]


def index_on_store(
    url: Url,
    options: StorageOptions | None,
    *,
    digests: bool,
    wanted: WantedSave,
    overwrite: bool,
    threads: int | None,
    progress: Progress,
) -> Path:
    """As :func:`dcp_rs.index`, of a URL. What is replaced is the index that was there before the data was read.

    Raises:
        StoragePreconditionError: a save was committed there meanwhile; it was not touched.
        StorageUnclearError: the store did not say whether the index is stored.
    """
    # What is secret gets no name here: tools show the variables of a traceback.
    store = _core.Store(os.fspath(url), options_for(url, options) or {})
    ((files, _),) = store.list([url])
    folder = url if files else url.parent  # of a single file
    store.begin(os.fspath(folder), None)
    if store.replaces and not overwrite:
        msg = f"there is an index at {folder / INDEX_NAME}; pass overwrite=True to replace it"
        raise CheckpointExistsError(msg, path=folder / INDEX_NAME)
    ((files, _),) = store.list([url])
    is_lost = any(is_data_file(name) for name, *_ in files)
    wanted.check_lost(url, is_lost=is_lost)
    # An index that is being replaced is no source: the data is.
    found = None if is_lost else _core.Index.from_data(os.fspath(url), options_for(url, options))
    with watching(progress, "indexing") as watch:
        if found is None:
            tell = None if watch is None else lambda done: watch(done, None)
            data = store.recover(
                os.fspath(folder),
                generation=wanted.generation,
                save_id=wanted.save_id,
                threads=threads or 0,
                progress=tell,
            )
        else:
            total = 0 if watch is None else payload(found)
            tell = None if watch is None else lambda done: watch(done, total)
            data = found.copy(
                prefix=None, digests=digests, save_id=uuid.uuid4().bytes, threads=threads or 0, progress=tell
            )
    store.replace_index(os.fspath(folder), data)
    return folder / INDEX_NAME
