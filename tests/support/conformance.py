"""Conformance cases for other readers of the format: what to read, and what to refuse.

A test of such a reader, a function of a folder: ::

    @pytest.mark.parametrize("case", conformance.cases(), ids=str)
    def test_my_reader(case, tmp_path):
        case.check(my_read, tmp_path)

One process of this release writes the checkpoints. Some are then damaged.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_rs import _core
from dcp_rs.api import save
from dcp_rs.checkpoint.index import index
from dcp_rs.dcp.writer import RsWriter
from support.oracle import raw_bytes, state_differences
from support.states import dtypes_state, random_tensor, shapes_state, strange_names_state

#: A tensor: its dtype (a name of section 6 of the format), its shape, its elements in row-major
#: order, little-endian. A value: its bytes.
Entry = tuple[str, tuple[int, ...], bytes] | bytes
#: A reader returns the entries of a folder by name. It refuses one with any exception.
Read = Callable[[Path], Mapping[str, Entry]]

INDEX = "index.dcprs"
#: Offsets of fields in the header (section 3.1 of the format).
VERSION, COMPAT, INCOMPAT, DIGEST, RESERVED_END = 8, 16, 24, 40, 232


class NonconformingError(AssertionError):
    """The reader does not conform to the format."""


@dataclass(frozen=True)
class Case:
    """A checkpoint that a reader must read, or refuse.

    Attributes:
        name: of the case, as ``str`` returns it.
        about: the subject, in a phrase.
        make: writes the checkpoint to a new folder. It returns the tensors and values by name, or
            None if a reader must refuse it.
    """

    name: str
    about: str
    make: Callable[[Path], dict[str, Any] | None]

    def __str__(self) -> str:
        return self.name

    def check(self, read: Read, folder: Path) -> None:
        """Write the checkpoint in an empty folder, and read it.

        Raises:
            NonconformingError: the reader returned other entries, or did not refuse.
        """
        path = folder / "checkpoint"
        want = self.make(path)
        if want is None:
            try:
                read(path)
            except Exception:  # noqa: BLE001  # a reader refuses with any exception
                return
            raise NonconformingError(
                f"{self.name}: it was taken, and had to be refused: {self.about}"
            )
        got = dict(read(path))
        if set(got) != set(want):
            names = (
                f"missing {sorted(set(want) - set(got))}, unexpected {sorted(set(got) - set(want))}"
            )
            raise NonconformingError(f"{self.name}: {names}")
        for name, value in want.items():
            _check_entry(f"{self.name}: {name!r}", got[name], value)


def _check_entry(what: str, got: Entry, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        expected = (
            str(want.dtype).removeprefix("torch."),
            tuple(want.shape),
            raw_bytes(want),
        )
        if isinstance(got, bytes):
            raise NonconformingError(f"{what}: a value, and not a tensor")
        for part, have, should in zip(("dtype", "shape", "bytes"), got, expected, strict=True):
            if have != should:
                raise NonconformingError(
                    f"{what}: another {part}: {have!r:.80}, not {should!r:.80}"
                )
        return
    if not isinstance(got, bytes):
        raise NonconformingError(f"{what}: a tensor, and not a value")
    differences = state_differences(torch.load(io.BytesIO(got), weights_only=True), want)
    if differences:
        raise NonconformingError(f"{what}: {differences[0]}")


# --- checkpoints to read


class _Cut(DefaultSavePlanner):
    """A planner that saves matrices in chunks of two rows and of so many columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._pieces(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def _pieces(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or len(data.size) != 2:
            return [item]
        rows, columns = data.size
        pieces = []
        for row, column in itertools.product(range(0, rows, 2), range(0, columns, self._width)):
            offsets = torch.Size((row, column))
            sizes = torch.Size((min(2, rows - row), min(self._width, columns - column)))
            chunk = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
            place = MetadataIndex(item.index.fqn, offsets)
            pieces.append(replace(item, index=place, type=WriteItemType.SHARD, tensor_data=chunk))
        return pieces

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None or write_item.type != WriteItemType.SHARD:
            whole: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return whole
        (row, column), (rows, columns) = data.chunk.offsets, data.chunk.sizes
        tensor: torch.Tensor = self.state_dict[write_item.index.fqn].detach()
        return tensor[row : row + rows, column : column + columns]


def _saved(make: Callable[[], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        state = make()
        save(dict(state), path, no_dist=True, fsync=False)
        return state

    return write


def _cut(width: int) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        state = {
            f"{rows}x{width}": random_tensor((rows, width), seed=rows)
            for rows, width in ((4, 4), (5, 3), (1, 7))
        }
        state["short"] = random_tensor((5, 4), torch.int16)
        writer = RsWriter(path, fsync=False)
        dcp.save(dict(state), storage_writer=writer, planner=_Cut(width), no_dist=True)
        return state

    return write


def _values() -> dict[str, Any]:
    return {
        "none": None,
        "number": -3,
        "float": 0.1,
        "text": "größe\n",
        "list": [1, "two", [None]],
        "bytes": b"\0\xff",
    }


def _nested(path: Path) -> dict[str, Any]:
    weight, step = random_tensor((3, 2)), torch.tensor(4.0, device="cpu")
    state = {
        "model": {"w": weight},
        "optim": {"state": [{"step": step}], "groups": {0: {"lr": 0.1}}},
    }
    save(state, path, no_dist=True, fsync=False)
    return {"model.w": weight, "optim.state.0.step": step, "optim.groups.0.lr": 0.1}


def _replaced(path: Path) -> dict[str, Any]:
    save(
        {"w": random_tensor((4,), seed=1), "gone": torch.zeros(2, device="cpu")},
        path,
        no_dist=True,
        fsync=False,
    )
    return _saved(lambda: {"w": random_tensor((6,), seed=2)})(path)


def _blocks() -> dict[str, Any]:
    return {
        "w": random_tensor(((1 << 20) + 100,), torch.uint8),
        "after": torch.arange(3, device="cpu"),
    }


def _adopted(path: Path) -> dict[str, Any]:
    path.mkdir()
    state = {"a.weight": random_tensor((2, 3), torch.bfloat16), "b": torch.arange(5, device="cpu")}
    save_file(state, path / "model.safetensors")
    index(path)
    return state


def _with_other_bits(path: Path) -> dict[str, Any]:
    state = _small(path)
    _change(path, {COMPAT: struct.pack("<Q", 1 << 63), RESERVED_END: b"\xff" * 24})
    return state


# --- checkpoints to refuse


def _small(path: Path) -> dict[str, Any]:
    return _saved(lambda: {"w": random_tensor((4, 4)), "step": 3})(path)


def _change(path: Path, fields: dict[int, bytes]) -> None:
    """Overwrite bytes of the index, and correct its digest."""
    raw = bytearray((path / INDEX).read_bytes())
    for at, new in fields.items():
        raw[at : at + len(new)] = new
    raw[DIGEST : DIGEST + 8] = bytes(8)
    raw[DIGEST : DIGEST + 8] = struct.pack("<Q", _core.block_digest(bytes(raw)))
    (path / INDEX).write_bytes(raw)


def _data_file(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def _renamed(path: Path) -> None:
    """Move the data file out of the folder, and let its name in the index lead there."""
    file = _data_file(path)
    outside = "../" + file.name[3:]
    raw = (path / INDEX).read_bytes()
    at = raw.index(file.name.encode())
    file.rename(path / outside)
    _change(path, {at: outside.encode()})


def _damage(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _small(path)
        change(path)

    return make


def _flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


_READ: list[tuple[str, str, Callable[[Path], dict[str, Any] | None]]] = [
    ("dtypes", "every dtype of section 6 that the installed torch has", _saved(dtypes_state)),
    (
        "shapes",
        "scalars, empty tensors, views, more than one block of digests",
        _saved(shapes_state),
    ),
    ("names", "names that are awkward as anything else than names", _saved(strange_names_state)),
    ("values", "what is no tensor: a zip archive of torch.save", _saved(_values)),
    ("nested", "names are paths joined by dots", _nested),
    ("empty", "a checkpoint of nothing", _saved(dict)),
    ("blocks", "a chunk of several blocks, each with its digest", _saved(_blocks)),
    ("rows", "tensors in pieces along the first dimension", _cut(100)),
    ("rectangles", "tensors in pieces along two dimensions", _cut(2)),
    ("replaced", "a save over another: the second generation alone", _replaced),
    ("adopted", "an index over a safetensors file of others (source 1)", _adopted),
    ("other bits", "unknown bits of compat and reserved bytes are ignored", _with_other_bits),
]
_REFUSED: list[tuple[str, str, Callable[[Path], None]]] = [
    (
        "no index",
        "data files without an index are no checkpoint",
        _damage(lambda path: (path / INDEX).unlink()),
    ),
    ("magic", "the first bytes are others", _damage(lambda path: _change(path, {0: b"\x88"}))),
    (
        "version",
        "a version that is not known",
        _damage(lambda path: _change(path, {VERSION: b"\x02"})),
    ),
    (
        "incompat",
        "a feature that is not known",
        _damage(lambda path: _change(path, {INCOMPAT + 7: b"\x80"})),
    ),
    ("digest", "a byte of the index was changed", _damage(lambda path: _flip(path / INDEX, 300))),
    ("cut index", "the index lacks its last byte", _damage(lambda path: _cut_short(path / INDEX))),
    ("no data", "a data file is missing", _damage(lambda path: _data_file(path).unlink())),
    (
        "cut data",
        "a data file lacks its last byte",
        _damage(lambda path: _cut_short(_data_file(path))),
    ),
    (
        "payload",
        "a byte of the payload was changed, and digests are checked",
        _damage(lambda path: _flip(_data_file(path), -1)),
    ),
    ("outside", "a data file's name leads out of the folder", _damage(_renamed)),
]


def cases(*, digests: bool = True) -> list[Case]:
    """Return all cases.

    Args:
        digests: include the damage that shows only in the digests of payloads.
    """
    refused = [case for case in _REFUSED if digests or case[0] != "payload"]
    return [Case(*case) for case in [*_READ, *refused]]
