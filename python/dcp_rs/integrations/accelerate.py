"""accelerate: the weights of a sharded checkpoint in one file.

Use :func:`dcp_rs.installed` for its saves and loads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dcp_rs._url import StrPath
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.conversion import convert
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import CheckpointNotFoundError

#: The folders of the first model and the first optimizer in one that ``save_state`` wrote.
_PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def merge_fsdp_weights(
    checkpoint_dir: StrPath,
    output_path: StrPath,
    safe_serialization: bool = True,  # as accelerate has it
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded weights, as ``accelerate.utils.merge_fsdp_weights`` does.

    It reads checkpoints of dcp-rs and of stock DCP. The first rank writes, in bounded memory, and
    the file appears in one step.

    Args:
        checkpoint_dir: a folder of a model (``pytorch_model_fsdp_0``) or of an optimizer
            (``optimizer_0``), which ``save_state`` makes.
        output_path: the folder for ``model.safetensors`` or ``pytorch_model.bin``. A file that is
            there is replaced.
        safe_serialization: write safetensors. Otherwise write a file of ``torch.save``, which can
            hold the state of an optimizer.
        remove_checkpoint_dir: remove ``checkpoint_dir`` afterwards.

    Raises:
        CheckpointNotFoundError: there is no checkpoint. For a folder that ``save_state`` made, the
            message says what to pass. It is a ``FileNotFoundError``.
        UnsupportedError: safetensors cannot hold an entry.
    """
    RankGroup().broadcast(
        lambda: _merge(
            local_path(checkpoint_dir),
            local_path(output_path),
            safe_serialization,
            remove_checkpoint_dir,
        )
    )


def _merge(folder: Path, output: Path, safe: bool, remove: bool) -> None:
    # A model.safetensors beside the parts would open as the checkpoint.
    inside = [part for part in _PARTS if (folder / part).is_dir()]
    if inside:
        parts = " or ".join(str(folder / part) for part in inside)
        msg = f"{folder} was made by save_state: pass {parts}"
        raise CheckpointNotFoundError(msg, path=folder)
    if remove and folder.resolve() in (output.resolve(), *output.resolve().parents):
        msg = (
            f"{output} is in {folder}, which remove_checkpoint_dir=True would remove with it: "
            "write it elsewhere"
        )
        raise ValueError(msg)
    index = open_index(folder)
    paths = [index.planner_path(number) for number in range(index.tensor_count)]
    # accelerate saves {"model": ...} or {"optimizer": ...}. The inner dict is written.
    tops = {path[0] if path is not None and len(path) > 1 else None for path in paths}
    top = tops.pop() if len(tops) == 1 else None
    output.mkdir(parents=True, exist_ok=True)
    target = output / ("model.safetensors" if safe else "pytorch_model.bin")
    convert(
        folder,
        target,
        to="safetensors" if safe else "torch",
        rename={top: ""} if isinstance(top, str) else None,
        overwrite=True,
    )
    if remove:
        shutil.rmtree(folder)
