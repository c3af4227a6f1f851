"""``dcp_rs.index``: an index for data that has none."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import Progress, watching
from dcp_rs._url import (
    StorageOptions,
    StoreArguments,
    StrPath,
    Url,
    location,
    options_for,
    store_at,
)
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file, local_path, make_folder
from dcp_rs.checkpoint.locate import payload
from dcp_rs.errors import CheckpointExistsError, CheckpointNotFoundError, UnsupportedError
from dcp_rs.options import ReadOptions, uuid_of


@suggest_option
def index(
    path: StrPath,
    *,
    out: StrPath | None = None,
    digests: bool = False,
    generation: int | None = None,
    save_id: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    storage_options: StoreArguments = None,
    progress: Progress = None,
) -> Path:
    """Write an index for existing data. The data is not changed.

    A foreign checkpoint (stock DCP, safetensors, ``torch.save``) then opens instantly. If a folder
    of dcp-rs lost its index, this hashes all of its data to rebuild it. Empty dicts and the kinds
    of dicts are not recovered.

    Args:
        path: a checkpoint folder, a ``.safetensors`` file, a ``.safetensors.index.json``, a file of
            ``torch.save``, a folder of dcp-rs without its index, or the URL of one on a store. In a
            folder with several models, pass the file of one model. The folder then opens as the
            file that you passed.
        out: a folder for the index. Default: beside the data, which is the only place on a store.
            An index elsewhere names its data by absolute paths, and opens with
            ``allow_external=True``.
        digests: hash foreign data too, so that you can verify it later.
        generation, save_id: which save to recover, if there are several. The generation is in the
            names of data files, and the id in their headers. The error for several saves lists
            both.
        overwrite: replace an existing index.
        threads: the number of threads that hash. Default: the cores of this process.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.
        progress: as for :func:`dcp_rs.verify`. The bytes to hash are None for a folder that lost
            its index.

    Returns:
        The path of the index.

    Raises:
        CheckpointExistsError: there is an index, and ``overwrite`` is not set; or it was created
            meanwhile.
        CheckpointReplacedError: a save was committed meanwhile, or the data is gone. Nothing was
            changed.
        CheckpointNotFoundError: there is no data to index.
        UnsupportedError: the folder holds a rank-local save (``use_collectives=False``), which an
            index of all ranks would hide; or several models, none of which transformers or
            diffusers would choose; or, without ``out``, a link that leads out of the folder and of
            Hugging Face's cache; or ``out`` is given for a URL.
        ValueError: an invalid option; or ``generation`` or ``save_id`` for foreign data.
        StoragePreconditionError: another index was stored meanwhile.
        StorageError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        dcp_rs.index("hf_model", digests=True)
        assert dcp_rs.verify("hf_model")
        ```
    """
    source, options = location(path), StorageOptions.of(storage_options)
    ReadOptions(threads=threads)
    if generation is not None and not 0 <= generation < 1 << 64:
        msg = f"generation={generation!r}: a number from 0 on, as in the names of data files"
        raise ValueError(msg)
    id_bytes = None if save_id is None else uuid_of(save_id).bytes
    maker = _Maker(generation, id_bytes, digests, threads, progress)
    if not isinstance(source, Url):
        options_for(source, options)  # it raises if there are any, for a folder
        return _index_files(source, None if out is None else local_path(out), maker, overwrite)
    if out is not None:
        msg = (
            f"{source}: the index of data on a store lies beside it: out= is for folders of "
            "the file system"
        )
        raise UnsupportedError(msg, path=source)
    return _index_on_store(source, options, maker, overwrite)


@dataclass(frozen=True)
class _Maker:
    """The arguments of :func:`index` that say how an index is made.

    Attributes:
        generation, save_id: the save to recover; None for the only one there is.
        digests, threads, progress: as the arguments.
    """

    generation: int | None
    save_id: bytes | None
    digests: bool
    threads: int | None
    progress: Progress

    def check_choice(self, source: Path, *, is_lost: bool) -> None:
        """Raise a ``ValueError`` if a save was chosen, but no index is to be recovered."""
        if not is_lost and (self.generation is not None or self.save_id is not None):
            msg = (
                "generation= and save_id= choose among saves of dcp-rs whose index is to be "
                f"rebuilt, and {source} holds none"
            )
            raise ValueError(msg)

    def recover(self, folder: Path, store: _core.Store | None = None) -> bytes:
        """Return an index of a save, rebuilt from all of its data."""
        with watching(self.progress, "indexing") as watch:
            return _core.recover(
                folder,
                generation=self.generation,
                save_id=self.save_id,
                threads=self.threads or 0,
                progress=None if watch is None else lambda done: watch(done, None),
                store=store,
            )

    def copy(self, found: _core.Index, prefix: Path | None = None) -> bytes:
        """Return a native index of the same data, with the id of the save that wrote it, if any."""
        save_id = uuid.uuid4() if found.save_id is None else uuid.UUID(found.save_id)
        with watching(self.progress, "indexing") as watch:
            total = 0 if watch is None else payload(found)
            return found.copy(
                prefix=prefix,
                digests=self.digests,
                save_id=save_id.bytes,
                threads=self.threads or 0,
                progress=None if watch is None else lambda done: watch(done, total),
            )


def _index_files(source: Path, out: Path | None, maker: _Maker, overwrite: bool) -> Path:
    folder = source if source.is_dir() else source.parent
    if out is not None and folder.exists() and out.exists() and out.samefile(folder):
        out = None
    target = folder if out is None else out
    if target.is_dir():
        _core.check_no_rank_indexes(target)
    before = _core.fingerprint(target / INDEX_NAME)
    if (target / INDEX_NAME).exists() and not overwrite:
        raise _exists(target)
    if not source.exists():
        msg = f"no checkpoint at {source}: there is no such path"
        raise CheckpointNotFoundError(msg, path=source)
    is_lost = source.is_dir() and _core.has_native_data(source)
    maker.check_choice(source, is_lost=is_lost)
    if is_lost:
        recovered = maker.recover(source)
        found = _core.Index.from_bytes(recovered, folder / INDEX_NAME, False)
    else:
        # Not from an index that is to be replaced.
        found = _core.Index.from_data(source)
    if out is None and (link := found.find_link_outside()) is not None:
        msg = (
            f"{link} is a link to something outside its folder, which is followed through an index "
            "only with allow_external=True: with an index beside it the folder would open no more "
            "as it does now. Give out=, a folder for the index, which is then opened with "
            "allow_external=True; or put the file in place of the link"
        )
        raise UnsupportedError(msg, path=link)
    data = maker.copy(found, None if out is None else folder.absolute())
    make_folder(target)
    _core.replace_index(target, data, before, True)
    return target / INDEX_NAME


def _index_on_store(
    url: Url, options: StorageOptions | None, maker: _Maker, overwrite: bool
) -> Path:
    """Do the same for a URL. It replaces only the index that it found at first."""
    store = store_at(url, options)
    ((files, _),) = store.list([url])
    folder = url if files else url.parent  # the URL of a single file
    store.begin(folder, None)
    if store.replaces and not overwrite:
        raise _exists(folder)
    ((files, _),) = store.list([url])
    is_lost = any(is_data_file(name) for name, *_ in files)
    maker.check_choice(url, is_lost=is_lost)
    if is_lost:
        data = maker.recover(folder, store)
    else:
        # Not from an index that is to be replaced.
        data = maker.copy(_core.Index.from_data(url, options_for(url, options)))
    store.replace_index(folder, data)
    return folder / INDEX_NAME


def _exists(folder: Path) -> CheckpointExistsError:
    path = folder / INDEX_NAME
    msg = f"there is an index at {path}; pass overwrite=True to replace it"
    return CheckpointExistsError(msg, path=path)
