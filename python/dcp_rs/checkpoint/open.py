"""``dcp_rs.open``: a checkpoint as a mapping."""

from __future__ import annotations

import os
from functools import partial
from typing import Literal, Unpack

import torch

from dcp_rs._arguments import suggest_option
from dcp_rs._url import StrPath, absolute, location
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.checkpoint.torch_checkpoint import Checkpoint
from dcp_rs.options import OpenArguments, check_choice, take_options


@suggest_option
def open(
    path: StrPath,
    framework: Literal["pt"] = "pt",
    device: torch.device | str | int = "cpu",
    **options: Unpack[OpenArguments],
) -> Checkpoint:
    """Open a checkpoint for reading by name. It is a mapping from names to tensors and values.

    The arguments are those of ``safetensors.safe_open(path, framework, device)``, and so are the
    methods of the result.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store. From a store each tensor is read when you
            ask for it. Files that each rank saved with ``torch.save`` are one checkpoint: give
            their folder, or a pattern (``"run/optim_world_size_8_rank_*.pt"``).
        framework: ``"pt"``. For a NumPy array, call ``numpy()`` of a tensor.
        device: the device of the tensors. ``"meta"`` gives shapes, dtypes and ``requires_grad``
            without reading a tensor.
        weights_only: refuse values that ``torch.load(weights_only=True)`` would refuse. That is the
            default.
        allow_external: open data files outside of the folder, if the index names any.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        storage_options, tiers, dequantize, views: see :class:`dcp_rs.RsReader`.

    Returns:
        A :class:`Checkpoint`.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        with dcp_rs.open("ckpt") as checkpoint:
            weight = checkpoint["model.weight"]
            first_rows = checkpoint.get_slice("model.weight")[:2]
        ```
    """
    source = LoadSource.of(path, take_options(open, options))
    check_choice("framework", framework, "pt")
    index, _ = source.open()
    where = os.fspath(absolute(location(path)))
    return Checkpoint(
        index,
        device=device,
        weights_only=source.weights_only,
        options=source.read,
        open_again=partial(open, where, framework, device, **source.given()),
    )
