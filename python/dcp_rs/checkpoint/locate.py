"""What is at a path: found out by looking, never by a flag."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, UnsupportedError

__all__ = [
    "INDEX_NAME",
    "STOCK_NAME",
    "holds_index",
    "is_data_file",
    "is_of_all_ranks",
    "is_rank_local",
    "local_path",
    "of_stock_data",
    "open_index",
    "payload",
    "rank_index_name",
    "suggestion",
    "warn_of_a_foreign_model",
]

#: A model on the Hugging Face hub: owner and name.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: What makes a folder a checkpoint, as far as its names tell.
_MODELS = ("model", "diffusion_pytorch_model", "adapter_model")
_MARKS = (
    "index.dcprs",
    ".metadata",
    *(name + end for name in _MODELS for end in (".safetensors", ".safetensors.index.json")),
)
#: Folders that are looked at, and named.
_LOOKED_AT, _NAMED = 1_000, 6


def suggestion(path: Path) -> str:
    """A sentence that helps, or nothing: it goes after the error that says that there is no checkpoint at ``path``."""
    if not path.exists():
        return (
            f"; it is a link to {path.readlink()}, which is not there"
            if path.is_symlink()
            else _of_nothing(path)
        )
    if path.is_file():
        inside = _is_checkpoint(path.parent)
        return f"; it is a file of the checkpoint {path.parent}: open that" if inside else ""
    inner = [child for child in _folders(path) if _is_checkpoint(child)]
    if inner:
        names = [
            child.name
            for child in sorted(inner, key=lambda child: natural(child.name), reverse=True)
        ]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = "it contains a checkpoint" if len(names) == 1 else "it contains checkpoints"
        return f"; {which}: {', '.join(map(repr, names[:_NAMED]))}{more}; open {path / names[0]}"
    above = next(
        (folder for folder in (path.parent, *path.parent.parents) if _is_checkpoint(folder)), None
    )
    return "" if above is None else f"; it is a folder in the checkpoint {above}: open that"


def of_stock_data(path: Path) -> str | None:
    """What a data file of a stock checkpoint is, and what to open in its place; None where the path is of another kind."""
    if path.suffix != ".distcp" or not path.is_file():
        return None
    if _is_checkpoint(path.parent):
        return f"it is a data file of the checkpoint {path.parent}: open that folder"
    return "it is a data file of a torch checkpoint: open its folder, which needs the .metadata file of the save"


def _of_nothing(path: Path) -> str:
    there = path.parent
    if there.is_dir():
        try:
            names = sorted(os.listdir(there))[:_LOOKED_AT]  # noqa: PTH208  # names are what is compared
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


def _is_checkpoint(folder: Path) -> bool:
    try:
        return any((folder / mark).is_file() for mark in _MARKS)
    except OSError:
        return False


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


INDEX_NAME = "index.dcprs"
#: What torch writes last of a checkpoint.
STOCK_NAME = ".metadata"

#: Names of data files (section 1.1 of the format).
_DATA_FILE = re.compile(r"g\d{8,}-[0-9a-f]{16}-r\d{5,}-f\d{5,}\.safetensors")
#: The names under which a rank publishes what it wrote alone: of this package, and of torch.
_RANK_LOCAL = (f"__*.{INDEX_NAME}", "__*.metadata")


def rank_index_name(rank: int) -> str:
    """The index of one rank of a rank-local save."""
    return f"__{rank}.{INDEX_NAME}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, if it is one of the file system; ``file://`` leads there.

    Raises:
        UnsupportedError: it has another scheme, as in ``s3://bucket/ckpt``.
    """
    found = location(path)
    if isinstance(found, Url):
        msg = f"{found}: here paths of the file system are supported, a store is not; stores are saved to by save, async_save, RsWriter and CheckpointManager, and read by load, open, RsReader, verify, diff and the commands that look"
        raise UnsupportedError(msg, path=found)
    return found


def open_index(
    path: str | os.PathLike[str],
    *,
    rank: int | None,
    allow_external: bool,
    verify: bool = False,
    storage_options: StorageOptions | None = None,
    layout: Layout | None = None,
) -> _core.Index:
    """Opens the checkpoint at ``path``, which may be a URL; with ``rank``, what that rank wrote in a rank-local save.

    With ``layout``, the index is that of logical tensors.

    Warns where ``verify`` is asked for and nothing has a digest, and where a checkpoint of torch is
    in the same folder.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path`` that is a checkpoint.
        CorruptIndexError, UnsafePickleError, UnsupportedError, StorageError: see
            :mod:`dcp_rs.errors`.
    """
    where = location(path)
    is_remote = isinstance(where, Url)
    try:
        # What is secret gets no name here: tools show the variables of a traceback.
        index = _core.Index.open(
            os.fspath(where), rank, allow_external, options_for(where, storage_options)
        )
    except (CheckpointNotFoundError, CorruptDataError, UnsupportedError) as error:
        if is_remote:
            raise
        if (what := of_stock_data(where)) is not None:
            # It was taken for a file of torch.save: what is said of that is beside the point.
            raise CheckpointNotFoundError(f"no checkpoint at {where}: {what}", path=where) from None
        if isinstance(error, CheckpointNotFoundError):
            error.args = (f"{error}{suggestion(where)}",)
        raise
    if verify and index.chunk_count and not index.has_digests():
        warn_caller(
            f"verify=True checks nothing in {path}: it has no digests; "
            "dcp_rs.index(path, digests=True) adds them, dcp_rs.convert writes a checkpoint that has them"
        )
    if rank is None and not is_remote and index.source == "dcp-rs":
        _warn_of_two(index.path.parent)
    return index if layout is None else layout.apply(index)


def payload(index: _core.Index) -> int:
    """Bytes of all chunks."""
    return sum(
        chunk.length for number in range(index.tensor_count) for chunk in index.chunks(number)
    )


def _warn_of_two(folder: Path) -> None:
    """Warns where a checkpoint of this package and one of torch are in one folder."""
    own, stock = folder / INDEX_NAME, folder / STOCK_NAME
    if not (own.is_file() and stock.is_file()):
        return
    newer = STOCK_NAME if stock.stat().st_mtime_ns > own.stat().st_mtime_ns else INDEX_NAME
    warn_caller(
        f"{folder} holds two checkpoints, one of dcp-rs ({INDEX_NAME}) and one of torch ({STOCK_NAME}): "
        f"that of dcp-rs is read, {newer} is newer. Remove one, or save them to different folders"
    )


def warn_of_a_foreign_model(folder: Path) -> None:
    """Warns where a save goes to a folder that holds a model of others: whoever opens it with other tools will go on to find that one."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:  # it is not there, or the save will say what is wrong with it
        return
    foreign = [name for name in names if _is_foreign(name)]
    if foreign:
        rest = "" if len(foreign) == 1 else f" and {len(foreign) - 1} more"
        warn_caller(
            f"{folder} holds a model that dcp-rs did not write ({foreign[0]}{rest}), and the checkpoint is saved beside it: other tools go on "
            "to read that model, dcp-rs reads the checkpoint. Save it to a folder of its own"
        )


def _is_foreign(name: str) -> bool:
    if name.endswith(".safetensors"):
        return not is_data_file(name)
    if name.startswith(("pytorch_model", "adapter_model")):
        return name.endswith((".bin", ".bin.index.json"))
    return name == STOCK_NAME or name.endswith(".safetensors.index.json")


def is_data_file(name: str) -> bool:
    """Whether a file with this name is a data file of this package."""
    return _DATA_FILE.fullmatch(name) is not None


def holds_index(folder: Path) -> bool:
    """Whether a folder holds a whole checkpoint of this package, or of torch: what makes it one, and be it a link that leads nowhere.

    Raises:
        OSError: that cannot be found out.
    """
    return any(_is_there(folder / name) for name in (INDEX_NAME, STOCK_NAME))


def is_of_all_ranks(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a folder. False of a store: whoever looks for an index there is told that there is none.

    Raises:
        OSError: that cannot be found out.
    """
    folder = location(path)
    return not isinstance(folder, Url) and holds_index(folder)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_rank_local(path: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a rank-local save, and none of all ranks."""
    folder = location(path)
    if isinstance(folder, Url) or holds_index(folder):
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _RANK_LOCAL)
