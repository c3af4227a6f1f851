"""What somebody may have meant by a path that holds no checkpoint."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from dcp_rs.checkpoint.names import natural

__all__ = ["of_stock_data", "suggestion"]

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
        return f"; it is a link to {path.readlink()}, which is not there" if path.is_symlink() else _of_nothing(path)
    if path.is_file():
        inside = _is_checkpoint(path.parent)
        return f"; it is a file of the checkpoint {path.parent}: open that" if inside else ""
    inner = [child for child in _folders(path) if _is_checkpoint(child)]
    if inner:
        names = [child.name for child in sorted(inner, key=lambda child: natural(child.name), reverse=True)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = "it contains a checkpoint" if len(names) == 1 else "it contains checkpoints"
        return f"; {which}: {', '.join(map(repr, names[:_NAMED]))}{more}; open {path / names[0]}"
    above = next((folder for folder in (path.parent, *path.parent.parents) if _is_checkpoint(folder)), None)
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
            return [Path(entry.path) for entry, _ in zip(entries, range(_LOOKED_AT), strict=False) if entry.is_dir()]
    except OSError:
        return []
