"""The result that ``convert`` and ``merge`` are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from dcp_rs._progress import Progress
from dcp_rs._url import (
    StorageOptions,
    StoreArguments,
    StrPath,
    Url,
    absolute,
    location,
    options_for,
)
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.source import IndexSource
from dcp_rs.checkpoint.views import View, Views
from dcp_rs.options import (
    Globs,
    ReadOptions,
    Rename,
    WriteOptions,
    check_choice,
    check_positive,
)
from dcp_rs.tensors.dtypes import parse_dtype

Format = Literal["dcp-rs", "dcp", "safetensors", "torch"]

#: The format of a file, by the ending of its name.
_ENDINGS: dict[str, Format] = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".safetensors": "safetensors",
}
#: Endings of files that this package does not write. A folder of such a name is a mistake.
_NOT_WRITTEN = (".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".pkl", ".zip")


class ConvertArguments(TypedDict, total=False):
    """Keyword arguments of :func:`dcp_rs.convert` and :func:`dcp_rs.merge`."""

    to: Format | None
    dtype: torch.dtype | str | None
    shards: int | None
    include: Globs
    exclude: Globs
    rename: Rename
    name: str
    skip_unsupported: bool
    overwrite: bool
    progress: Progress
    threads: int | None
    verify: bool
    fsync: bool
    max_inflight_bytes: int | None
    weights_only: bool | None
    allow_external: bool
    storage_options: StoreArguments
    out_storage_options: StoreArguments
    dequantize: bool | torch.dtype
    views: View | Iterable[View] | None


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """The result to write. The fields are arguments of :func:`dcp_rs.convert`.

    Attributes:
        out: the path or URL, which does not depend on the current folder.
        suffix: the ending of the path as it was given. ``"."`` has none, whatever folder it is.
        storage_options: the options of the store of ``out``, if it is on one.
        input_storage_options: those of inputs that are URLs.
        views: the views to apply to the inputs.
    """

    out: Path
    suffix: str
    storage_options: StorageOptions | None
    input_storage_options: StorageOptions | None
    views: Views
    to: Format | None = None
    dtype: torch.dtype | None = None
    shards: int | None = None
    include: Globs = None
    exclude: Globs = None
    rename: Rename = None
    name: str = "model"
    skip_unsupported: bool = False
    overwrite: bool = False
    progress: Progress = None
    threads: int | None = None
    verify: bool = True
    fsync: bool = True
    max_inflight_bytes: int | None = None
    weights_only: bool = True
    allow_external: bool = False

    @classmethod
    def of(cls, inputs: Sequence[Path], out: StrPath, given: dict[str, Any]) -> WriteRequest:
        """Return the request for a caller's arguments, which this takes out of ``given``.

        Raises:
            UnsupportedError: storage options were given, but no path is a URL.
            ValueError, TypeError: an option has an invalid value.
        """
        target = location(out)
        of_inputs, of_out = (
            given.pop("storage_options", None),
            given.pop("out_storage_options", None),
        )
        if isinstance(target, Url) and of_out is None:
            of_out = of_inputs
        else:
            options_for(target, of_out)
            if not any(isinstance(path, Url) for path in inputs):
                options_for(inputs[0], of_inputs)
        weights_only = given.pop("weights_only", None)
        return cls(
            out=absolute(target),
            suffix=target.suffix,
            storage_options=of_out,
            input_storage_options=of_inputs,
            views=Views.of(given.pop("dequantize", None), given.pop("views", None)),
            dtype=parse_dtype(given.pop("dtype", None)),
            weights_only=weights_only is None or bool(weights_only),
            **given,
        )

    def __post_init__(self) -> None:
        check_choice("to", self.target, *get_args(Format))
        if self.to is None and self.suffix in _NOT_WRITTEN:
            msg = f"{self.out}: no {self.suffix} files are written; choose a format with to="
            raise ValueError(msg)
        check_positive("shards", self.shards)
        if not self.name or "/" in self.name:
            msg = f"name={self.name!r}: what files are called"
            raise ValueError(msg)
        if self.as_file and (self.shards or 1) > 1:
            msg = f"shards={self.shards}: {self.out} is one file"
            raise ValueError(msg)

    def open(self, path: Path) -> IndexSource:
        """Open an input."""
        index = open_index(
            path,
            allow_external=self.allow_external,
            storage_options=self.input_storage_options if isinstance(path, Url) else None,
            views=self.views,
        )
        return IndexSource(index, self.read_options)

    @property
    def globs(self) -> str:
        """The globs that were given, for messages."""

        def shown(globs: Globs) -> str:
            return repr(globs[0] if isinstance(globs, Sequence) and len(globs) == 1 else globs)

        both = {"include": self.include, "exclude": self.exclude}
        return ", ".join(
            f"{name}={shown(globs)}" for name, globs in both.items() if globs is not None
        )

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
