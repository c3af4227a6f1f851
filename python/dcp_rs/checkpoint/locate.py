"""The checkpoint at a path: its index, or an error that suggests another path."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import Progress
from dcp_rs._url import (
    StorageOptions,
    StoreArguments,
    StrPath,
    Url,
    absolute,
    location,
    options_for,
    store_at,
)
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import (
    INDEX_NAME,
    STOCK_NAME,
    is_of_all_ranks,
    is_rank_local,
    local_path,
    remember,
)
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Views
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    InternalError,
    StorageError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions, check_choice, given, split_options

#: The name of a model on the Hugging Face hub: owner and model.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: The names of models, by the ending of their files.
_MODELS = {
    ".safetensors": ("model", "diffusion_pytorch_model", "adapter_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model", "adapter_model"),
}
#: The files by which a folder is recognized as a checkpoint.
MARKS = frozenset(
    {
        INDEX_NAME,
        STOCK_NAME,
        *(
            f"{name}{end}"
            for ending, names in _MODELS.items()
            for name in names
            for end in (ending, f"{ending}.index.json")
        ),
    }
)
#: The most folders that a suggestion looks at, and names.
_LOOKED_AT, _NAMED = 1_000, 6


@dataclass(frozen=True, kw_only=True)
class LoadSource:
    """A checkpoint, and how to read it. :class:`dcp_rs.RsReader` describes the attributes."""

    path: os.PathLike[str]
    read: ReadOptions = field(default_factory=ReadOptions)
    weights_only: bool = True
    allow_external: bool = False
    replicas: Literal["each", "node", "all"] = "each"
    storage_options: StorageOptions | None = None
    views: Views | None = None
    progress: Progress = None
    tiers: Tiers | None = None

    @classmethod
    def of(cls, path: StrPath, options: Mapping[str, Any]) -> LoadSource:
        """Return the source for arguments of :class:`dcp_rs.RsReader` that ``take_options`` took.

        Raises:
            ValueError, TypeError, UnsupportedError: an option has an invalid value.
        """
        of_read, rest = split_options(options, ReadOptions)
        check_choice("replicas", rest.get("replicas", "each"), "each", "node", "all")
        weights_only, tiers = rest.pop("weights_only", None), rest.pop("tiers", None)
        check_choice("weights_only", weights_only, True, False, None)
        return cls(
            path=location(path),
            read=ReadOptions(**of_read),
            weights_only=weights_only is None or weights_only,
            views=Views.of(rest.pop("dequantize", None), rest.pop("views", None)),
            tiers=None if tiers is None else _tiers_of(tiers),
            **rest,
        )

    @property
    def find_routes(self) -> FindRoutes | None:
        """Finds the ranks that read what this one does not see; None if it sees all."""
        return None if self.tiers is None else self.tiers.find_routes

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        own = given(self)
        views = {} if self.views is None else given(self.views)
        for name in ("path", "read", "views"):
            own.pop(name, None)
        if self.tiers is not None:
            own["tiers"] = self.tiers.folders
        return given(self.read) | own | views

    def open(self, rank: int | None = None) -> tuple[_core.Index, bool]:
        """Open the index of all ranks. If there is none, open that of a rank's rank-local save.

        Returns:
            The index, and true if it is of all ranks.
        """
        open_now = partial(
            open_index,
            self.path,
            allow_external=self.allow_external,
            verify=self.read.verify is True,
            storage_options=self.storage_options,
            views=self.views,
            tiers=self.tiers,
        )
        try:
            return open_now(), True
        except CheckpointNotFoundError as missing:
            if rank is None or is_of_all_ranks(self.path):  # a broken link, for example
                raise
            try:
                return open_now(rank=rank), False
            except Exception as own:  # noqa: BLE001  # one of the two is raised
                raise (own if is_rank_local(self.path) else missing) from None


def open_index(
    path: StrPath,
    *,
    rank: int | None = None,
    allow_external: bool = False,
    verify: bool = False,
    storage_options: StorageOptions | None = None,
    views: Views | None = None,
    tiers: Tiers | None = None,
) -> _core.Index:
    """Open the index of the checkpoint at a path or URL.

    It warns if ``verify`` is set and the checkpoint has no digests, if the folder holds a
    checkpoint of torch as well, and if quantized weights are kept as stored.

    Args:
        path: the path or URL.
        rank: in a rank-local save, the rank; None for a save of all ranks.
        allow_external: open data files outside of the folder.
        verify: whether the caller will verify digests.
        storage_options: for a URL.
        views: the views to apply.
        tiers: folders that are asked for each data file first, as in :class:`LoadSource`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        CorruptIndexError, UnsafePickleError, UnsupportedError, StorageError: see
            :mod:`dcp_rs.errors`.
    """
    where = location(path)
    is_remote = isinstance(where, Url)
    folders = () if tiers is None else tiers.folders
    try:
        # Secrets get no variable here, as tools show the variables of a traceback.
        index = _core.Index.open(
            where, rank, allow_external, options_for(where, storage_options), folders
        )
    except (CheckpointNotFoundError, CorruptDataError, UnsupportedError) as error:
        if is_remote:
            raise
        if (what := _stock_data_file(where)) is not None:
            # The engine took it for a file of torch.save, so its error would mislead.
            raise CheckpointNotFoundError(f"no checkpoint at {where}: {what}", path=where) from None
        if isinstance(error, CheckpointNotFoundError):
            error.args = (f"{error}{_suggestion(where)}",)
        raise
    if tiers is not None and tiers.opened is not None:
        tiers.opened.append(index)
    remember(where)
    if verify and index.chunk_count and not index.has_digests():
        warn_caller(
            f"verify=True checks nothing in {path}: it has no digests; "
            "dcp_rs.index(path, digests=True) adds them, dcp_rs.convert writes a checkpoint that "
            "has them"
        )
    if rank is None and not is_remote and index.source == "dcp-rs":
        stock = index.path.parent / STOCK_NAME
        if stock.is_file():
            _warn_of_two(index.path, stock)
    if views is None:
        return index
    if views.dequantize is None and (pairs := index.codes_beside_scales()):
        codes, scale = pairs[0]
        more = f", and {len(pairs) - 1} more are stored so" if len(pairs) > 1 else ""
        warn_caller(
            f"{codes!r} in {path} looks quantized, with its scale in {scale!r}{more}: what is read "
            "are the stored codes, not weights; dequantize=True decodes the formats that are known"
        )
    return views.apply(index)


@dataclass
class Routes:
    """The other ranks that read data files for a rank, and those that it reads for.

    Attributes:
        sources: the rank that reads each file, by its name.
        askers: the ranks that this one reads for.
        most: the largest number of askers of any rank.
    """

    sources: dict[str, int] = field(default_factory=dict)
    askers: set[int] = field(default_factory=set)
    most: int = 0


#: Given the data files that each rank lacks, it chooses who reads them, on the coordinator.
FindRoutes = Callable[[list[list[str]]], list[Routes]]


@dataclass(frozen=True)
class Tiers:
    """Folders that are asked for each data file first, and other ranks that may read it.

    Attributes:
        folders: the folders, the nearest first.
        find_routes: finds other ranks that have the files that no folder has; None if none does.
        opened: gets each index that is opened; None to keep none.
    """

    folders: tuple[str, ...] = ()
    find_routes: FindRoutes | None = None
    opened: list[_core.Index] | None = None


def _tiers_of(tiers: Tiers | Iterable[StrPath]) -> Tiers:
    """Return the tiers for the option ``tiers``.

    Raises:
        TypeError: one path in place of several.
        UnsupportedError: a URL.
    """
    if isinstance(tiers, Tiers):
        return tiers
    if isinstance(tiers, str | os.PathLike) or not isinstance(tiers, Iterable):
        msg = f"tiers={tiers!r}: pass a list of folders"
        raise TypeError(msg)
    return Tiers(tuple(os.fspath(absolute(local_path(tier))) for tier in tiers))


@suggest_option
def exists(path: StrPath, *, storage_options: StoreArguments = None) -> bool:
    """Return whether there is a checkpoint at a path or URL, of any format that dcp-rs reads.

    Ask this before you resume, in place of ``os.path.exists(f"{path}/.metadata")``: only
    checkpoints of torch have such a file. In a job of several ranks, each rank looks for itself.

    Args:
        path: a folder, a file or a URL, as for :func:`dcp_rs.load`.
        storage_options: see :class:`dcp_rs.RsReader`.

    Returns:
        True if a save was committed there. A damaged checkpoint exists, so that a load raises its
        error, and no run begins anew in its place. False if there is nothing, something else, or a
        first save that did not finish.

    Raises:
        OSError, StorageError: the path or the store cannot be read.
        InternalError: a bug in dcp-rs.
        UnsupportedError: a scheme or an option of the store is unknown.

    Example:
        ```python
        state = {"model": model, "step": 0}
        if dcp_rs.exists("ckpt"):
            dcp_rs.load(state, "ckpt")
        ```
    """
    where = location(path)
    # Secrets get no variable here, as tools show the variables of a traceback.
    options = StorageOptions.of(storage_options)
    if isinstance(where, Url):  # wrong options must not look like a checkpoint that cannot be read
        store_at(where, options)
    else:
        options_for(where, options)
    try:
        try:
            _core.Index.open(where, None, False, options_for(where, options))
        except CheckpointNotFoundError:
            if not isinstance(where, Url):
                # A broken link in the place of an index is a checkpoint out of reach.
                return is_of_all_ranks(where) or is_rank_local(where)
            _core.Index.open(where, 0, False, options_for(where, options))
    except CheckpointNotFoundError:
        return False
    except (OSError, StorageError, InternalError):
        raise
    except DcpRsError:  # damaged, or of a later version
        pass
    return True


def payload(index: _core.Index) -> int:
    """Return the bytes of all chunks."""
    return sum(
        chunk.length for number in range(index.tensor_count) for chunk in index.chunks(number)
    )


def _warn_of_two(own: Path, stock: Path) -> None:
    """Warn that checkpoints of this package and of torch share a folder."""
    newer = stock if stock.stat().st_mtime_ns > own.stat().st_mtime_ns else own
    warn_caller(
        f"{own.parent} holds two checkpoints, one of dcp-rs ({INDEX_NAME}) and one of torch "
        f"({STOCK_NAME}): that of dcp-rs is read, {newer.name} is newer. Remove one, or save them "
        "to different folders"
    )


def _suggestion(path: Path) -> str:
    """Return the end of an error about a path without a checkpoint: what to open in its place."""
    if not path.exists():
        if path.is_symlink():
            return f"; it is a dangling link to {path.readlink()}"
        return _for_missing(path)
    if path.is_file():
        inside = _is_checkpoint(path.parent)
        return f"; it is a file of the checkpoint {path.parent}: open that" if inside else ""
    if inner := checkpoints_in(path):
        names = [child.name for child in reversed(inner)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = "it contains a checkpoint" if len(names) == 1 else "it contains checkpoints"
        return f"; {which}: {', '.join(map(repr, names[:_NAMED]))}{more}; open {path / names[0]}"
    above = next((folder for folder in path.parents if _is_checkpoint(folder)), None)
    return "" if above is None else f"; it is a folder in the checkpoint {above}: open that"


def _for_missing(path: Path) -> str:
    there = path.parent
    if there.is_dir():
        try:
            names = sorted(os.listdir(there))[:_LOOKED_AT]  # noqa: PTH208  # names are compared
        except OSError:
            return ""
        close = difflib.get_close_matches(path.name, names, n=1)
        return f"; did you mean {there / close[0]}?" if close else ""
    if _HUB_ID.fullmatch(str(path)):
        return (
            f"; if {path} is a model on the Hugging Face hub, download it first "
            f"(path = huggingface_hub.snapshot_download({str(path)!r})) and open that path"
        )
    nearest = next(folder for folder in there.absolute().parents if folder.is_dir())
    missing = there.absolute().relative_to(nearest).parts[0]
    return f"; {nearest} has no {missing!r}"


def _stock_data_file(path: Path) -> str | None:
    """Return what to open in place of a ``.distcp`` file; None for other paths."""
    if path.suffix != ".distcp" or not path.is_file():
        return None
    if _is_checkpoint(path.parent):
        return f"it is a data file of the checkpoint {path.parent}: open that folder"
    return (
        "it is a data file of a torch checkpoint: open its folder, which needs the .metadata file "
        "of the save"
    )


def _is_checkpoint(folder: Path) -> bool:
    try:
        return any((folder / mark).is_file() for mark in MARKS)
    except OSError:
        return False


def checkpoints_in(path: Path) -> list[Path]:
    """Return the folders in a folder that are checkpoints, as a person counts."""
    found = [child for child in _folders(path) if _is_checkpoint(child)]
    return sorted(found, key=lambda child: natural(child.name))


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [
                Path(entry.path)
                for entry, _ in zip(entries, range(_LOOKED_AT), strict=False)
                if entry.is_dir()
            ]
    except OSError:
        return []
