"""The result that ``convert`` and ``merge`` are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dcp_rs._progress import Progress
from dcp_rs._url import StorageOptions, Url, options_for
from dcp_rs.checkpoint.names import Rename
from dcp_rs.options import ReadOptions, WriteOptions

__all__ = ["Format", "WriteRequest", "stores_of"]

Format = Literal["dcp-rs", "dcp", "safetensors", "torch"]

#: The format of a file, by the ending of its name.
_ENDINGS: dict[str, Format] = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".safetensors": "safetensors",
}


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """The result to write. The fields are arguments of :func:`dcp_rs.convert`.

    Attributes:
        out: the path or URL, which does not depend on the current folder.
        suffix: the ending of the path as it was given. ``"."`` has none, whatever folder it is.
        storage_options: the options of the store of ``out``, if it is on one.
    """

    out: Path
    suffix: str
    to: Format | None
    dtype: torch.dtype | None
    shards: int | None
    include: str | Iterable[str] | None
    exclude: str | Iterable[str] | None
    rename: Rename
    name: str
    skip_unsupported: bool
    overwrite: bool
    progress: Progress
    threads: int | None
    verify: bool
    fsync: bool
    max_inflight_bytes: int | None
    weights_only: bool
    storage_options: StorageOptions | None

    def __post_init__(self) -> None:
        if self.target not in get_args(Format):
            msg = f"to={self.to!r}: must be one of {', '.join(map(repr, get_args(Format)))}"
            raise ValueError(msg)
        shards = self.shards
        if shards is not None and not (type(shards) is int and shards > 0):
            msg = f"shards={shards!r}: must be a positive integer"
            raise ValueError(msg)
        if not self.name or "/" in self.name:
            msg = f"name={self.name!r}: what files are called"
            raise ValueError(msg)
        if self.as_file and (shards or 1) > 1:
            msg = f"shards={shards}: {self.out} is one file"
            raise ValueError(msg)

    @property
    def target(self) -> Format:
        """The format. Default: by the ending of ``out``."""
        return _ENDINGS.get(self.suffix, "dcp-rs") if self.to is None else self.to

    @property
    def as_file(self) -> bool:
        """True if ``out`` is a file."""
        return self.target == "torch" or (
            self.target == "safetensors" and self.suffix == ".safetensors"
        )

    @property
    def write_options(self) -> WriteOptions:
        """The options to write with."""
        # A temporary folder for an upload need not survive a power failure.
        fsync = self.fsync and not isinstance(self.out, Url)
        return WriteOptions(
            threads=self.threads, fsync=fsync, max_inflight_bytes=self.max_inflight_bytes
        )

    @property
    def read_options(self) -> ReadOptions:
        """The options to read with."""
        return ReadOptions(
            threads=self.threads, verify=self.verify, max_inflight_bytes=self.buffer_bytes
        )

    @property
    def buffer_bytes(self) -> int:
        """The bytes of a buffer. Reads, writes and the blocks on their way share the bound."""
        return max(1, self.write_options.inflight_bytes(accelerator=False) // 4 >> 20) << 20


def stores_of(
    inputs: Sequence[Path],
    out: Path,
    given: Mapping[str, Any] | Any | None,
    given_for_out: Mapping[str, Any] | Any | None,
) -> tuple[StorageOptions | None, StorageOptions | None]:
    """Return the storage options of inputs that are URLs, and of the result.

    Raises:
        UnsupportedError: options were given, but no path is a URL.
    """
    of_inputs, of_out = StorageOptions.of(given), StorageOptions.of(given_for_out)
    if isinstance(out, Url) and of_out is None:
        return of_inputs, of_inputs
    options_for(out, of_out)
    if not any(isinstance(path, Url) for path in inputs):
        options_for(inputs[0], of_inputs)
    return of_inputs, of_out
