"""``load_file`` and ``save_file``, as in ``safetensors.torch``."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Unpack

import torch

from dcp_rs import _core
from dcp_rs._arguments import check_arguments, suggest_option
from dcp_rs._url import StrPath, absolute
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.open import Checkpoint, read_whole
from dcp_rs.conversion.job import aborting
from dcp_rs.conversion.output import new_output
from dcp_rs.conversion.safetensors import header, why_not_of
from dcp_rs.engine.writes import Entry, refuse_meta, write_entries
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import (
    ReadArguments,
    ReadOptions,
    WriteArguments,
    WriteOptions,
    check_choice,
)
from dcp_rs.tensors.memory import parse_device, why_not_raw

_BACKENDS: dict[str, Literal["mmap", "buffered"]] = {"mmap": "mmap", "pread": "buffered"}


@suggest_option
def load_file(
    filename: StrPath,
    device: torch.device | str | int = "cpu",
    *,
    backend: Literal["mmap", "pread"] | None = None,
    **read_options: Unpack[ReadArguments],
) -> dict[str, torch.Tensor]:
    """Load all tensors of a file, as ``safetensors.torch.load_file`` does.

    The file may be a checkpoint of any kind. The tensors have memory of their own: what happens to
    the file later does not change them. ``backend="mmap"`` returns private views of the mapped file
    instead, as safetensors does. That copies nothing, and reads what you touch. Use it for files
    that are replaced by a rename, as :func:`save_file` does. If a program writes to the file in
    place, parts of a view that were not touched yet change too. If the file is cut short, touching
    them ends the process.

    Args:
        filename: a ``.safetensors`` file, or another checkpoint that holds only tensors.
        device: where the tensors go.
        backend: ``"mmap"`` returns views of the file, for tensors on the CPU that are stored in
            one piece. ``"pread"`` is ``io="buffered"``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.

    Returns:
        The tensors by name.

    Raises:
        ValueError: another ``backend``.
        UnsupportedError: an entry is not a tensor.
        CheckpointNotFoundError, CorruptIndexError, CorruptDataError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        tensors = dcp_rs.load_file("hf_model/model.safetensors")
        ```
    """
    check_arguments(load_file, read_options)
    if backend is not None:
        check_choice("backend", backend, *_BACKENDS)
        read_options.setdefault("io", _BACKENDS[backend])
    options = ReadOptions(**read_options)
    device = parse_device(device)
    index = open_index(filename, verify=options.verify is True)
    in_place = backend == "mmap" and device.type == "cpu"
    for number in range(index.tensor_count):
        entry = index.tensor(number)
        if entry.is_bytes:
            msg = f"{entry.name!r} in {os.fspath(filename)} is not a tensor: dcp_rs.open reads it"
            raise UnsupportedError(msg, path=os.fspath(filename), tensor=entry.name)
    if in_place or device.type == "meta":
        return dict(Checkpoint(index, device=device, options=options))
    return read_whole(index, range(index.tensor_count), device, options)


@suggest_option
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: StrPath,
    metadata: Mapping[str, str] | None = None,
    **write_options: Unpack[WriteArguments],
) -> None:
    """Write tensors, on any device, to one file, as ``safetensors.torch.save_file`` does.

    The file appears in one step, when it is complete and durable. Until then the old file stays.
    If ``filename`` is a link, the link is replaced, and the file that it leads to stays.

    Args:
        tensors: contiguous tensors by name, none of which shares memory with another.
        filename: the file. Its folder is created if needed.
        metadata: text for ``__metadata__`` in the header; transformers asks for ``{"format":
            "pt"}``.
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.

    Raises:
        TypeError: ``tensors`` is not a mapping; or a name, or something in ``metadata``, is not
            text.
        PlanError: a tensor is not contiguous, or shares memory with another one. It is a
            ``ValueError``.
        UnsupportedError: safetensors cannot hold a tensor.
        OSError: the disk is full, or fails. The old file, if there was one, is still there.

    Example:
        ```python
        dcp_rs.save_file(model.state_dict(), "model.safetensors", metadata={"format": "pt"})
        ```
    """
    check_arguments(save_file, write_options)
    options = WriteOptions(**write_options)
    _check_types(tensors, metadata)
    target = absolute(local_path(filename))  # a link at the end is replaced
    if target.is_dir() and not target.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(filename))
    # Large elements first, so that every tensor is aligned.
    checked = sorted(_checked(tensors), key=lambda named: -named[1].itemsize)
    _check_no_shared_memory(checked)
    head = header(
        metadata, ((name, tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in checked)
    )
    entries = [
        Entry(name, tensor, shape := tuple(tensor.shape), (0,) * len(shape), shape)
        for name, tensor in checked
    ]
    values, at = [], len(head)
    for entry in entries:
        values.append(_core.PlacedValue(entry.fqn, 0, at, entry.nbytes))
        at += entry.nbytes
    with new_output(target, "anything") as made:
        save = _core.Save.create_files(
            made.parent, [(made.name, head, at)], values, **options.engine()
        )
        with aborting(save):
            write_entries(save, entries, options)
            save.finish()


def _check_types(tensors: Any, metadata: Any) -> None:
    if not isinstance(tensors, Mapping):
        msg = (
            f"tensors is a {type(tensors).__name__}: pass a dict of tensors by name, such as "
            "model.state_dict()"
        )
        raise TypeError(msg)
    if metadata is not None and not (
        isinstance(metadata, Mapping)
        and all(isinstance(text, str) for pair in metadata.items() for text in pair)
    ):
        msg = f"metadata={metadata!r}: pass a dict of text by name, such as {{'format': 'pt'}}"
        raise TypeError(msg)


def _checked(tensors: Mapping[Any, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors by name, if safetensors can hold all of them."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            msg = f"{name!r} names a tensor: a name is text"
            raise TypeError(msg)
        refusal = _why_not(name, tensor)
        if refusal is not None:
            msg = f"safetensors cannot hold {name!r}: {refusal}"
            raise UnsupportedError(msg, path=None, tensor=name)
        refuse_meta(name, tensor)
        if not tensor.is_contiguous():
            msg = (
                f"tensor {name!r} is not contiguous: save tensor.contiguous(), "
                "or the whole of what it is a part of"
            )
            raise PlanError(msg, tensor=name)
    return [(name, tensor.detach()) for name, tensor in tensors.items()]


def _why_not(name: str, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}"
    if name == "__metadata__":
        return "the name is one that safetensors keeps for itself"
    if tensor.device.type != "meta" and (refusal := why_not_raw(tensor)) is not None:
        return refusal
    what = why_not_of(tensor.dtype, tensor.shape)
    return None if what is None else f"its dtype is {what}"


def _check_no_shared_memory(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Raise if tensors share memory: the file would store it twice, and a load would untie them."""
    places = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.nbytes, name)
        for name, tensor in tensors
        if tensor.nbytes
    )
    for (device, begin, nbytes, name), (next_device, next_begin, _, other) in pairwise(places):
        if device == next_device and next_begin < begin + nbytes:
            msg = (
                f"tensors {name!r} and {other!r} share memory: leave one out and tie them again "
                "after a load (safetensors.torch.save_model does so), or save a clone of it"
            )
            raise PlanError(msg, tensor=other)
