"""The extension module. Internal: use the names of ``dcp_rs`` itself.

Extents (offsets, sizes, strides) are tuples of non-negative integers. Strides are in elements. The
caller keeps the memory at an address alive until the call returns. All I/O releases the GIL, and
Ctrl-C stops it.
"""

import builtins
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, Unpack, final

from typing_extensions import Buffer

__version__: str

_Path: TypeAlias = str | os.PathLike[str]
_Extent: TypeAlias = Sequence[int]
_Size = TypeVar("_Size", bound=_Extent)
_Made = TypeVar("_Made")

class _ReadOptions(TypedDict, total=False):
    """Keyword arguments of reads. ``io`` and ``threads`` are required; ``verify=None``: auto."""

    io: str
    threads: int
    verify: bool | None
    shared: bool
    max_inflight_bytes: int

class _WriteOptions(TypedDict):
    """Keyword arguments of functions that create files. ``local_ranks`` defaults to 1."""

    threads: int
    fsync: bool
    io: str
    max_inflight_bytes: int
    local_ranks: NotRequired[int]

class _SaveOptions(_WriteOptions):
    """Keyword arguments of functions that create the files of a save."""

    save_id: builtins.bytes
    generation: int
    token: int
    rank: int
    world_size: int

@final
class FileMapping(Buffer):
    """Private (copy-on-write) mapping of a data file, with the buffer protocol."""

    def __len__(self) -> int: ...

@final
class TensorEntry:
    """Tensor or value of an index."""

    @property
    def name(self) -> str: ...
    @property
    def is_bytes(self) -> bool: ...
    @property
    def dtype(self) -> str | None:
        """The dtype; None for a value."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def flags(self) -> int: ...
    @property
    def chunk_count(self) -> int: ...

@final
class ChunkEntry:
    """Chunk: ``length`` bytes from ``offset`` of a file, and a rectangle of its tensor."""

    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...

@final
class FileEntry:
    """Data file of an index."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def data_start(self) -> int:
        """The first byte of the payload."""
    @property
    def external(self) -> bool:
        """True if the file lies outside of the checkpoint's folder."""

@final
class Overlap:
    """Overlap of a chunk and a region."""

    @property
    def chunk(self) -> int: ...
    @property
    def chunk_offsets(self) -> tuple[int, ...]:
        """Offsets of the overlap in the chunk."""
    @property
    def region_offsets(self) -> tuple[int, ...]:
        """Offsets of the overlap in the region."""
    @property
    def sizes(self) -> tuple[int, ...]: ...

@final
class Damage:
    """Damaged block of a data file, or a whole file that does not match the index."""

    @property
    def path(self) -> Path: ...
    @property
    def tensor(self) -> str:
        """The tensor that has the block. Empty for a whole file, or for bytes of no tensor."""
    @property
    def whole_file(self) -> bool: ...
    @property
    def block(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def expected(self) -> str: ...
    @property
    def got(self) -> str: ...

@final
class Leftover:
    """File or folder that a killed save or conversion left."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> Literal["data", "temporary index", "rank index", "conversion"]: ...
    @property
    def verdict(self) -> Literal["left", "in use", "young", "whole"]: ...

@final
class ReadStats:
    """Counts of a read: bytes, and the number of requests."""

    @property
    def wanted(self) -> int:
        """Bytes delivered to destinations."""
    @property
    def read(self) -> int: ...
    @property
    def direct(self) -> int:
        """Bytes read with direct I/O."""
    @property
    def mapped(self) -> int:
        """Bytes read from mappings."""
    @property
    def verified(self) -> int:
        """Bytes hashed and compared with digests."""
    @property
    def requests(self) -> int: ...

@final
class Fill:
    """Memory to fill with a rectangle of a chunk or of a tensor."""

    def __init__(
        self, source: int, offsets: _Extent, sizes: _Extent, address: int, strides: _Extent
    ) -> None: ...

@final
class Part:
    """Memory with the bytes of an item from ``at`` on."""

    def __init__(self, item: int, at: int, address: int, nbytes: int) -> None: ...

@final
class PlacedValue:
    """Range of a file that the caller has laid out."""

    def __init__(self, name: str, file: int, offset: int, length: int) -> None: ...
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...

@final
class Index:
    """Open, validated index."""

    @staticmethod
    def open(
        path: _Path,
        rank: int | None,
        allow_external: bool,
        storage_options: Mapping[str, str] | None = None,
        tiers: Sequence[str] = (),
    ) -> Index:
        """Open the index at `path`, which is a URL if `storage_options` are given.

        Data files are read from `tiers`, folders, where these have them.
        """
    def pass_over(self, path: _Path, reason: str) -> bool:
        """Read a data file from elsewhere from now on, if it is in a tier. Return whether it is."""
    def lacking(self) -> list[str]:
        """Return the data files that reads asked for so far, and that no tier had."""
    def take_delivered(self) -> list[tuple[Path, int]]:
        """Return the bytes that reads delivered from each tier since the last call."""
    @staticmethod
    def from_bytes(data: bytes, path: _Path, allow_external: bool) -> Index: ...
    @staticmethod
    def from_data(path: _Path, storage_options: Mapping[str, str] | None = None) -> Index:
        """Make an index of the foreign checkpoint at `path`, and ignore an index that is there.

        `path` is a URL if `storage_options` are given.
        """
    @property
    def path(self) -> Path:
        """The file of the index; for an index in memory, the path of its checkpoint."""
    @property
    def is_in_memory(self) -> bool: ...
    @property
    def is_remote(self) -> bool: ...
    @property
    def save_id(self) -> str | None: ...
    @property
    def generation(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def writer(self) -> str | None: ...
    @property
    def source(self) -> str: ...
    @property
    def tensor_count(self) -> int: ...
    @property
    def chunk_count(self) -> int: ...
    def has_digests(self) -> bool: ...
    def to_bytes(self) -> bytes: ...
    def names(self) -> list[str]: ...
    def name(self, tensor: int) -> str: ...
    def find(self, fqn: str) -> int | None: ...
    def tensor(self, tensor: int) -> TensorEntry: ...
    def chunks(self, tensor: int) -> list[ChunkEntry]:
        """Return the chunks of a tensor, sorted by offsets."""
    def make_chunks(
        self,
        tensor: int,
        make: Callable[[_Size, _Size], _Made],
        extent: Callable[[tuple[int, ...]], _Size],
    ) -> list[_Made]:
        """Return ``make(extent(offsets), extent(sizes))`` for each chunk, sorted by offsets."""
    def first_chunk(self, tensor: int) -> int: ...
    def chunk_strides(self, chunk: int) -> tuple[int, ...] | None: ...
    def chunk_signs(self, chunk: int) -> tuple[bool, bool]:
        """Return whether elements of a chunk are conjugates, and negatives, of its bytes."""
    def is_in_place(self, chunk: int) -> bool:
        """Return True if the bytes of a chunk are its elements, and so usable in place."""
    @property
    def is_view(self) -> bool:
        """True if the index has logical tensors, which no index file stores."""
    def coded_from(self, tensor: int) -> tuple[str, list[str]] | None:
        """Return the format and the stored tensors that a tensor is decoded from.

        Return None if it is stored as it is.
        """
    def codes_beside_scales(self) -> list[tuple[str, str]]:
        """Return the names of tensors with codes, each with that of a scale."""
    def dequantize(self, dtype: str, **options: Unpack[_ReadOptions]) -> Index | None:
        """Return the index with quantized weights as ``dtype``; None if it has none."""
    def derive(
        self,
        hidden: Sequence[int],
        tensors: Sequence[
            tuple[
                str,
                Sequence[int],
                Sequence[
                    tuple[int, Sequence[int], Sequence[int], Sequence[int | None], Sequence[int]]
                ],
            ]
        ],
    ) -> Index:
        """Return the index with other tensors in place of the ``hidden`` ones.

        Each has a name, a shape, and rectangles. A rectangle has a stored tensor, offsets and sizes
        in it, the stored dimension (or None) of each new dimension, and offsets in the new tensor.
        """
    def dtype_of(self, chunk: int) -> str | None: ...
    def files_of(self, chunks: Sequence[int]) -> list[int]: ...
    def file_order(self) -> list[int]: ...
    def files(self) -> list[FileEntry]: ...
    def use_of_files(self) -> list[tuple[int, bool]]:
        """Return for each data file the bytes that chunks use, and whether it is a linked file."""
    def file_paths(self) -> list[Path]:
        """Return the paths of the data files, in the order of ``files``."""
    def planner_path(self, tensor: int) -> tuple[Any, ...] | None: ...
    def planner_root(self) -> Any: ...
    def nesting(self) -> list[tuple[int, tuple[Any, ...], str]] | None:
        """Return containers (position, path, kind) that no path shows; None if unknown."""
    def positions(self) -> list[int | None]:
        """Return the position of each entry in the state dict, in the order of ``names``."""
    def locate(self, wanted: Sequence[tuple[str, _Extent | None, int | None]]) -> list[int]:
        """Return the chunk for each (fqn, offset, hint)."""
    def map_file(self, file: int) -> FileMapping: ...
    def check_files(self, chunks: Sequence[int]) -> None: ...
    def describe(
        self, names: Sequence[str]
    ) -> list[tuple[int, str | None, tuple[int, ...]] | None]:
        """Return (tensor, dtype, shape) for each name, with dtype None for a value.

        Return None for a name that the index does not have.
        """
    def check_expanded(self, tensors: Sequence[int]) -> None:
        """Raise if tensors are much larger than the data files, as strides of 0 make them."""
    def check_regions(
        self, regions: Sequence[tuple[int, _Extent, _Extent]], values: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Check the data files of regions (tensor, offsets, sizes) and of values.

        Return the parts (region, offsets, sizes) that no chunk holds.
        """
    def plan_plain(
        self,
        names: Sequence[str],
        tensors: Sequence[Any],
        types: tuple[type, ...],
        dtypes: Mapping[Any, str],
    ) -> tuple[Batch, list[int]]:
        """Plan the plain tensors: those in host memory, in the stored dtype and shape.

        Return a batch that fills them, and the places of all other tensors.
        """
    def touching(self, tensor: int, offsets: _Extent, sizes: _Extent) -> list[Overlap]:
        """Return the overlaps of chunks and a region. They need not cover the region."""
    def read_chunks(self, fills: Sequence[Fill], **options: Unpack[_ReadOptions]) -> ReadStats:
        """Fill memory from chunks."""
    def read_regions(self, fills: Sequence[Fill], **options: Unpack[_ReadOptions]) -> ReadStats:
        """Fill memory from tensors."""
    def read_bytes(self, chunks: Sequence[int], **options: Unpack[_ReadOptions]) -> list[bytes]: ...
    def verify(
        self, *, threads: int, progress: Callable[[int], object] | None = None
    ) -> tuple[list[Damage], int, int]:
        """Verify all data. Return the damage, the bytes hashed, and the bytes without a digest."""
    def find_link_outside(self) -> Path | None:
        """Return a data file that is a link out of the folder.

        Opening the index file refuses such a link without ``allow_external``.
        """
    def copy(
        self,
        *,
        prefix: _Path | None,
        digests: bool,
        save_id: bytes,
        threads: int,
        progress: Callable[[int], object] | None = None,
    ) -> bytes: ...
    def verify_chunks(self, chunks: Sequence[int], **options: Unpack[_ReadOptions]) -> None: ...

@final
class Batch:
    """Destinations of one load, planned, and checked without reading. The caller keeps the tensors.

    Destinations that share memory are filled in several passes. Targets and parts are those of
    ``dcp_rs.transfer.target`` and ``dcp_rs.tensors.memory``.
    """

    def __new__(cls, index: Index) -> Batch: ...
    def __len__(self) -> int: ...
    def add(self, targets: Sequence[Any]) -> None:
        """Add targets in host memory of the stored dtype, to fill in place."""
    def add_device_target(self, number: int, target: Any, device: int, there: bool) -> None:
        """Add a target, with the caller's ``number``, that the caller fills through slabs.

        ``there``: its memory exists already.
        """
    def add_opaque(self, number: int, target: Any, parts: Sequence[Any]) -> None:
        """Add a target that only its own class can fill. ``parts`` are its memory."""
    def arrange(self) -> int:
        """Find the passes after the last target was added, and return their number.

        A target that a later one overwrites has no pass.
        """
    def divide(self, common: SharedSections) -> None:
        """Set the sections that other ranks read too, after :meth:`arrange`."""
    def slab_regions(self, number: int) -> list[int]:
        """Return the parts of a pass that go through slabs: numbers for ``SlabReader.create``."""
    def opaque(self, number: int) -> list[int]:
        """Return the numbers of the targets that their own class fills in a pass."""
    def at_once(self) -> list[int]:
        """Return the places that are filled entirely in the first pass."""
    def leave_out(self, places: Sequence[int]) -> None:
        """Take these places out of the passes."""
    def read(
        self,
        number: int,
        *,
        progress: Callable[[int], object] | None = None,
        **options: Unpack[_ReadOptions],
    ) -> ReadStats:
        """Fill the targets of a pass that are filled in place.

        ``progress`` is called from time to time with the bytes so far.
        """

@final
class SharedSections:
    """Sections of a checkpoint that other ranks of the machine read too."""

@final
class Sample:
    """Sample of a rank's reads. Its size does not depend on the model."""

    def __new__(cls, index: Index) -> Sample: ...
    def add_batch(self, batch: Batch) -> None:
        """Add the targets of a batch of the same index that are filled in place."""
    def add(self, regions: Sequence[tuple[int, bool, _Extent, _Extent]]) -> None:
        """Add regions (source, true for a chunk, offsets, sizes). Skip parts without a chunk."""
    def to_bytes(self) -> bytes:
        """Return the sample for the coordinator: 1 KiB."""
    def with_reply(self, reply: bytes) -> SharedSections | None:
        """Combine the sample with the coordinator's reply. Return None if the reply is invalid."""

def compare_samples(samples: Sequence[tuple[bytes, bytes]]) -> list[tuple[int, bytes]]:
    """Compare the samples of all ranks, on the coordinator.

    Each has the machine and ``Sample.to_bytes``. Return for each the number of samples of its
    machine, and the reply.
    """

@final
class SaveItem:
    """Chunk of a tensor, or a value (without ``dtype``), of ``length`` bytes.

    ``path`` and ``position`` are those in the state dict.
    """

    def __init__(
        self,
        name: str,
        length: int,
        *,
        dtype: str | None = None,
        shape: _Extent | None = None,
        offsets: _Extent | None = None,
        sizes: _Extent | None = None,
        flags: int = 0,
        path: tuple[Any, ...] | None = None,
        position: int | None = None,
    ) -> None: ...

@final
class SavePlan:
    """Items of one rank: plain tensors, which are places in a list, then other items."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add_plain(
        self,
        names: list[str],
        paths: list[Any] | None,
        tensors: list[Any],
        types: tuple[type, ...],
        dtypes: dict[Any, str],
        *,
        positions: list[int | None] | None = None,
        cast: str | None = None,
        shapes: list[Any] | None = None,
    ) -> list[int]:
        """Add the plain tensors, and return the places of the others."""
    def add(self, items: Sequence[SaveItem]) -> None: ...
    def request(self) -> bytes:
        """Return the request for the coordinator."""
    def kept_others(self, keep: bytes | None) -> list[int]:
        """Return the items given to ``add`` that this rank saves."""
    def create(
        self,
        folder: _Path,
        keep: bytes | None,
        lengths: Sequence[int],
        *,
        turns: Sequence[int] | None = None,
        reuse: Reuse | None = None,
        store: Store | None = None,
        **options: Unpack[_SaveOptions],
    ) -> Save:
        """Create the files of this rank's plain tensors, and then of its other items.

        ``lengths`` and ``turns`` have the length of each other item, and the turn in which it is
        written.
        """
    def reuse(
        self,
        keep: bytes | None,
        lengths: Sequence[int],
        parent: Index | None,
        frozen: Sequence[bool],
        trusted: bool,
    ) -> Reuse:
        """Find the items that a parent may hold.

        ``frozen`` says for each item that it never changes. ``trusted`` says that a frozen item did
        not change since the parent was saved.
        """
    def kept_names(self, keep: bytes | None) -> list[str]:
        """Return the names of the items that this rank saves."""

@final
class Copy:
    """Bytes of a slab, and the part of a target that they fill.

    The part is one run of memory (``begin``), or a rectangle (``box``).
    """

    @property
    def target(self) -> int: ...
    @property
    def at(self) -> int:
        """The first byte in the slab."""
    @property
    def nbytes(self) -> int: ...
    @property
    def begin(self) -> int | None:
        """The first byte in the target, in units of its stored elements."""
    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The offsets and sizes in the target."""

class SlabReader:
    """Load in progress: threads that fill slabs ahead of the caller."""

    @staticmethod
    def create(
        batch: Batch,
        regions: Sequence[int],
        slab_bytes: int,
        *,
        sort: bool,
        **options: Unpack[_ReadOptions],
    ) -> SlabReader:
        """Plan the slabs of ``batch``. Parts for different devices never share a slab."""
    @property
    def batch_count(self) -> int: ...
    @property
    def workers(self) -> int:
        """The best number of slabs to fill at a time."""
    def batch(self, batch: int) -> tuple[int, list[Copy]]:
        """Return the number of the device, and the copies in the order of their places."""
    def start(self, slabs: Sequence[tuple[int, int]], memory: object, workers: int) -> None:
        """Begin to fill slabs: (address, bytes) of memory that ``memory`` keeps alive.

        Addresses are multiples of 4096.
        """
    def next(self) -> tuple[int, int] | None:
        """Return the next filled (batch, slab), in order; None after the last."""
    def release(self, slab: int) -> None: ...
    def close(self) -> None:
        """Stop the load. After that no slab is touched."""
    def stats(self) -> ReadStats:
        """Return the counts, after :meth:`close`."""

@final
class Reuse:
    """Comparison of one rank's items with a parent. It takes bytes as a ``Save`` does."""

    def wanted(self) -> list[bool]:
        """Return for each item whether it needs the bytes."""
    def probed(self) -> list[bool]:
        """Return for each item whether the first block of 1 MiB is enough."""
    def write(self, parts: Sequence[Part]) -> None: ...
    def write_plain(
        self, tensors: list[Any], types: tuple[type, ...], dtypes: dict[Any, str]
    ) -> None:
        """Compare the plain tensors that it needs."""
    def write_values(self, values: Sequence[tuple[int, bytes]]) -> None: ...
    def verify(self, threads: int) -> list[str]:
        """Read what would be reused. Return the damage; damaged items will be written."""
    def problems(self) -> list[str]:
        """Return the reasons why files of the parent are not reused."""

@final
class Store:
    """Store for one save. Its commit replaces what was there when the save began."""

    def __new__(cls, url: _Path, storage_options: Mapping[str, str]) -> Store: ...
    def begin(self, folder: _Path, rank: int | None) -> int:
        """Look at what a save to ``folder`` will replace, and return the number of the save.

        With ``rank``, the save is that of one rank.
        """
    def has_index(self, folder: _Path, rank: int | None) -> bool:
        """Return whether there is an index."""
    def discard(self, folder: _Path, rank: int | None, indexes: Sequence[bytes]) -> None:
        """Call the function of this name on the store, for the files of several ranks."""
    def leftovers(self, folder: _Path, older_than: float | None) -> list[Leftover]:
        """Call the function of this name on the store."""
    def clean(
        self, folder: _Path, older_than: float | None
    ) -> tuple[list[Leftover], list[Leftover], list[str]]:
        """Call the function of this name on the store."""
    def list(
        self, folders: Sequence[str | Path]
    ) -> builtins.list[
        tuple[builtins.list[tuple[str, int, float, str | None]], builtins.list[str]]
    ]:
        """Return files (name, length, age in seconds, tag) and folders of each folder."""
    def read(self, paths: Sequence[str | Path]) -> builtins.list[bytes | None]:
        """Return the bytes of each file; None for a file that is not there."""
    def put(self, path: _Path, data: bytes) -> None:
        """Store a file, and replace one of the same name."""
    def asks_conditions(self, folder: _Path) -> bool:
        """Return whether the store keeps conditions. One request in a process finds out."""
    def put_new(self, path: _Path, data: bytes) -> None:
        """Store a new file. If there is another one, raise ``StoragePreconditionError``."""
    def has(self, path: _Path, data: bytes) -> bool:
        """Return whether a file has these bytes, and is the one that was seen before, if any."""
    def upload_file(
        self,
        path: _Path,
        to: str | Path,
        *,
        overwrite: bool,
        threads: int,
        max_inflight_bytes: int,
    ) -> None:
        """Upload a local file. Without ``overwrite``, the target must not exist."""
    def upload_folder(
        self,
        files: Sequence[tuple[str | Path, str | Path]],
        last: tuple[str | Path, str | Path] | None,
        *,
        claim: tuple[str | Path, bytes],
        threads: int,
        max_inflight_bytes: int,
    ) -> None:
        """Upload local files (from, to), and then the last one, which must not exist.

        After a failure, the uploaded files are removed. They stay if the last one may be there, or
        if ``claim`` (a file and its content) is another's.
        """
    def remove(self, paths: Sequence[str | Path]) -> None:
        """Remove files that exist. Try all, and raise for the first that could not be removed."""
    def remove_seen(self, path: _Path) -> None:
        """Remove a file that was read, if it exists. Raise if another replaced it."""
    def replace_index(self, folder: _Path, index: bytes) -> None:
        """Store an index over existing data, in place of the index seen at :meth:`begin`."""
    @property
    def keeps_conditions(self) -> bool:
        """True if the store refuses to replace a file that changed."""
    @property
    def replaces(self) -> bool:
        """True if there was an index when the save began."""
    @property
    def replaces_ranks(self) -> bool:
        """True if single ranks had indexes when the save of all ranks began. It replaces them."""

@final
class Save:
    """Data files of one rank in one save."""

    @staticmethod
    def create(
        folder: _Path,
        items: Sequence[SaveItem],
        *,
        store: Store | None = None,
        **options: Unpack[_SaveOptions],
    ) -> Save:
        """Lay out the files for the items, and create them."""
    @staticmethod
    def create_files(
        folder: _Path,
        files: Sequence[tuple[str, bytes, int]],
        values: Sequence[PlacedValue],
        *,
        crc32: bool = False,
        **options: Unpack[_WriteOptions],
    ) -> Save:
        """Create files (name, header, size) in the caller's own layout.

        Ignore the result of :meth:`finish`. ``crc32`` enables :meth:`crc32s`.
        """
    def write(self, parts: Sequence[Part]) -> None:
        """Write parts. Those of an item come in order; all but the last are multiples of 1 MiB."""
    def write_plain(
        self, tensors: list[Any], types: tuple[type, ...], dtypes: dict[Any, str]
    ) -> None:
        """Write the plain tensors of the plan. One that differs from the plan ends the save."""
    def write_values(self, values: Sequence[tuple[int, bytes]]) -> None:
        """Write values (item, bytes)."""
    def write_template(self, template: Template, first: int) -> None:
        """Write the pieces of a template, which are the items from ``first`` on."""
    def crc32s(self) -> list[int]:
        """Return the CRC-32 of each item. That of an item not yet written has no meaning."""
    def watch(self, progress: Callable[[int], object]) -> None:
        """Call ``progress`` with the bytes written so far, from now on."""
    @property
    def plain_count(self) -> int: ...
    @property
    def bytes(self) -> int:
        """The bytes to write."""
    @property
    def bytes_reused(self) -> int:
        """The bytes of a parent that are linked, or copied by a store."""
    @property
    def problems(self) -> list[str]:
        """The reasons why files of the parent could not be linked or copied."""
    @property
    def requests(self) -> int:
        """The requests to a store, for parts and copies. 0 on a disk."""
    def reused(self) -> list[bool]:
        """Return for each item whether it is reused, and so not written."""
    def finish(
        self, nesting: list[tuple[int, tuple[Any, ...], str]] | None = None
    ) -> builtins.bytes:
        """Complete the files, and return an index over them. The files stay claimed.

        ``nesting`` has containers as in ``Index.nesting``.
        """
    def unlock(self) -> None:
        """Release the claim on the files."""
    def abort(self) -> list[str]:
        """Remove the files. Return the reasons why something is still on the store."""

def sum_regions(
    inputs: Sequence[tuple[Index, float]],
    sums: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int], int, bool]],
    *,
    double: bool,
    **options: Unpack[_ReadOptions],
) -> None:
    """Compute weighted sums of regions of the inputs.

    Each sum has a tensor of each input, offsets, sizes, the address of the result, and whether the
    result is bfloat16.
    """

@final
class Template:
    """Stream that keeps what is written to it.

    Of the ``nbytes`` of memory from ``address`` on, it keeps only the position, and does not read
    them.
    """

    def __new__(cls, address: int, nbytes: int) -> Template: ...
    def write(self, data: Buffer) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def holes(self) -> list[tuple[int, int, int]]:
        """Return (first byte in the file, distance from ``address``, length) of the gaps."""
    def pieces(self) -> list[tuple[int, int]]:
        """Return (first byte in the file, length) of the bytes kept."""
    def seal(
        self,
        path: _Path,
        archives: Sequence[tuple[int, int]],
        filled: Sequence[tuple[int, int, int]],
        threads: int,
    ) -> None:
        """Enter the CRC-32 of all records of the zip archives (first byte, length).

        Those of ``filled`` (first byte, length, CRC-32) are known.
        """

def recover(
    folder: _Path,
    *,
    generation: int | None,
    save_id: bytes | None,
    threads: int,
    progress: Callable[[int], object] | None = None,
    store: Store | None = None,
) -> bytes: ...
def assign_saves(requests: Sequence[bytes]) -> tuple[list[bytes], int, list[int]]:
    """Assign items to ranks.

    Return for each rank a bit for each item of its request, the number of items in all, and the
    bytes of each rank.
    """

def commit_indexes(
    folder: _Path,
    rank: int | None,
    indexes: Sequence[bytes],
    *,
    save_id: bytes,
    generation: int,
    planner_data: Any,
    items: int | None,
    names: Iterable[str],
    fsync: bool,
    overwrite: bool = True,
    store: Store | None = None,
    publish: bool = True,
) -> tuple[Index, list[str]]:
    """Merge the indexes of all ranks, and commit the result.

    Return the index, and the reasons why files of the previous checkpoint are still there. Without
    ``overwrite`` nothing is replaced. On a store, that applies to the indexes of single ranks, and
    ``Store.begin`` decides about the index itself. Without ``publish`` nothing is written.
    """

def check_no_rank_indexes(folder: _Path) -> None:
    """Raise if a rank has an index of its own in the folder."""

def has_native_data(folder: _Path) -> bool: ...
def next_generation(folder: _Path) -> int: ...
def available_cores() -> int:
    """Return the cores of this process, by its affinity and the quota of its cgroup."""

def refusal(data: bytes) -> tuple[bool, str] | None:
    """Return why torch should not unpickle a value: whether it is damaged, and the reason.

    Return None if torch may.
    """

def block_digest(data: bytes) -> int:
    """Return the XXH3-64 of a block, as the format defines it."""

def create_folder(folder: _Path) -> None:
    """Create a folder and its parents, durably. An existing folder stays as it is."""

def publish(folder: _Path, name: str, data: bytes, fsync: bool) -> None:
    """Publish ``data`` under a name, in one step."""

@final
class Fingerprint:
    """State of a path: a file, or a folder and its content."""

def fingerprint(path: _Path) -> Fingerprint | None:
    """Return the state of a path; None if nothing is there."""

def replace_index(folder: _Path, index: bytes, before: Fingerprint | None, fsync: bool) -> None:
    """Replace the index of a folder in one step and under its lock, if it is still ``before``."""

def put_in_place(from_: _Path, to: _Path, before: Fingerprint | None) -> None:
    """Rename a finished file or folder in one step, if the target is still ``before``.

    The old target is at ``from_`` or beside it afterwards. If it could not be put back after an
    error, the ``filename2`` of the ``OSError`` names its place.
    """

LOCK_NAME: str

@final
class FolderLock:
    """Lock of a folder, held while this object exists. Waits over `notice` seconds are logged."""

    def __init__(self, folder: _Path, *, notice: float = 10.0) -> None: ...
    def read(self) -> bytes:
        """Return the bytes in the file of the lock."""

    def write(self, data: bytes, fsync: bool) -> None:
        """Store bytes in the file of the lock. Later bytes must have the same length."""

def leftovers(path: _Path, older_than: float | None) -> list[Leftover]:
    """Return what killed saves and conversions left. Change nothing."""

def clean(
    path: _Path, older_than: float | None
) -> tuple[list[Leftover], list[Leftover], list[str]]:
    """Remove leftovers. Return what was removed, what was kept, and the failures."""

def discard(folder: _Path, rank: int | None, index: bytes) -> None:
    """Remove the data files that ``index`` names and the published index does not.

    With ``rank``, the published index is that of the rank.
    """
