"""The extension module. Internal: use the names of ``dcp_rs`` itself.

Extents (offsets, sizes, strides) are tuples of non-negative integers. Strides are in elements. Addresses are those of memory that the caller keeps
alive until the call returns. The GIL is released during all I/O, and Ctrl-C stops it.
"""

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, Unpack, final

from typing_extensions import Buffer

__version__: str

_Extent: TypeAlias = Sequence[int]
_Size = TypeVar("_Size", bound=_Extent)
_Made = TypeVar("_Made")

class _ReadOptions(TypedDict, total=False):
    """The keyword arguments of whatever reads; ``io`` and ``threads`` are always given. ``verify=None``: "auto"."""

    io: str
    threads: int
    verify: bool | None
    shared: bool
    max_inflight_bytes: int

class _WriteOptions(TypedDict):
    """The keyword arguments of functions that create files; ``local_ranks`` defaults to 1."""

    threads: int
    fsync: bool
    io: str
    max_inflight_bytes: int
    local_ranks: NotRequired[int]

class _SaveOptions(_WriteOptions):
    """The keyword arguments of functions that create the files of a save."""

    save_id: builtins.bytes
    generation: int
    token: int
    rank: int
    world_size: int

@final
class FileMapping(Buffer):
    """A private (copy-on-write) mapping of a data file, with the buffer protocol."""

    def __len__(self) -> int: ...

@final
class TensorEntry:
    """A tensor, or a value, of an index."""

    @property
    def name(self) -> str: ...
    @property
    def is_bytes(self) -> bool: ...
    @property
    def dtype(self) -> str | None:
        """None for a value."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def flags(self) -> int: ...
    @property
    def chunk_count(self) -> int: ...

@final
class ChunkEntry:
    """Where a chunk is: ``length`` bytes from ``offset`` of a file, and a rectangle of its tensor."""

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
    """A data file of an index."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def data_start(self) -> int:
        """First byte of the payload."""
    @property
    def external(self) -> bool:
        """Whether it lies outside of the checkpoint's folder."""

@final
class Overlap:
    """What a chunk holds of a region."""

    @property
    def chunk(self) -> int: ...
    @property
    def chunk_offsets(self) -> tuple[int, ...]:
        """Where it begins in the chunk."""
    @property
    def region_offsets(self) -> tuple[int, ...]:
        """Where it begins in the region."""
    @property
    def sizes(self) -> tuple[int, ...]: ...

@final
class Damage:
    """A block that is not what was written, or a file that is not as the index says."""

    @property
    def path(self) -> Path: ...
    @property
    def tensor(self) -> str:
        """Empty where it is a part that belongs to none, or the whole file."""
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
    """What a killed save or conversion left."""

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
    """What a read took, in bytes; and the pieces of files that it asked for, each in one go."""

    @property
    def wanted(self) -> int:
        """Delivered to destinations."""
    @property
    def read(self) -> int: ...
    @property
    def direct(self) -> int:
        """Of those read, past the page cache."""
    @property
    def mapped(self) -> int:
        """Of those read, from mappings."""
    @property
    def verified(self) -> int:
        """Hashed and compared with digests."""
    @property
    def requests(self) -> int: ...

@final
class Fill:
    """Memory to be filled with a rectangle of a chunk, or of a tensor."""

    def __init__(
        self, source: int, offsets: _Extent, sizes: _Extent, address: int, strides: _Extent
    ) -> None: ...

@final
class Part:
    """Memory that holds the bytes of an item from ``at``."""

    def __init__(self, item: int, at: int, address: int, nbytes: int) -> None: ...

@final
class PlacedValue:
    """A place in a file that the caller has laid out."""

    def __init__(self, name: str, file: int, offset: int, length: int) -> None: ...
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...

@final
class Index:
    """An open, validated index."""

    @staticmethod
    def open(
        path: str,
        rank: int | None,
        allow_external: bool,
        storage_options: Mapping[str, str] | None = None,
    ) -> Index:
        """Opens what is at `path`, which is a URL where `storage_options` are given."""
    @staticmethod
    def from_bytes(data: bytes, path: str, allow_external: bool) -> Index: ...
    @staticmethod
    def from_data(path: str, storage_options: Mapping[str, str] | None = None) -> Index:
        """An index made of what others wrote at `path`, whatever index lies there; a URL where `storage_options` are given."""
    @property
    def path(self) -> Path:
        """The file it comes from; of one in memory the path of what it was made of."""
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
        """Sorted by offsets."""
    def make_chunks(
        self,
        tensor: int,
        make: Callable[[_Size, _Size], _Made],
        extent: Callable[[tuple[int, ...]], _Size],
    ) -> list[_Made]:
        """``make(extent(offsets), extent(sizes))`` for each chunk, sorted by offsets."""
    def first_chunk(self, tensor: int) -> int: ...
    def chunk_strides(self, chunk: int) -> tuple[int, ...] | None: ...
    def chunk_signs(self, chunk: int) -> tuple[bool, bool]:
        """Whether the elements of a chunk are the conjugates of its bytes, and whether they are their negatives."""
    def is_in_place(self, chunk: int) -> bool:
        """Whether the bytes of a chunk are its elements, so that they can be used where they lie."""
    @property
    def is_view(self) -> bool:
        """Whether it has logical tensors, of which no index file knows."""
    def coded_from(self, tensor: int) -> tuple[str, list[str]] | None:
        """The format and the names of the stored tensors that a tensor is decoded from; None of one that is stored as it is."""
    def dequantize(self, dtype: str, **options: Unpack[_ReadOptions]) -> Index | None:
        """The same checkpoint with its quantized weights as tensors of ``dtype``; None where it has none."""
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
        """The same checkpoint with other tensors in the place of the ``hidden`` ones.

        Each has a name, a shape, and rectangles: a tensor, offsets and sizes in it, for each dimension of the new tensor that of the other or None, and
        where it goes.
        """
    def dtype_of(self, chunk: int) -> str | None: ...
    def files_of(self, chunks: Sequence[int]) -> list[int]: ...
    def file_order(self) -> list[int]: ...
    def files(self) -> list[FileEntry]: ...
    def use_of_files(self) -> list[tuple[int, bool]]:
        """For each data file, the bytes that chunks take in it, and whether it is a link to what another save wrote."""
    def file_paths(self) -> list[Path]:
        """Where the data files are, in the order of ``files``."""
    def planner_path(self, tensor: int) -> tuple[Any, ...] | None: ...
    def planner_root(self) -> Any: ...
    def nesting(self) -> list[tuple[int, tuple[Any, ...], str]] | None:
        """The containers (position, path, kind) that paths do not tell; None where it is not known which there were."""
    def positions(self) -> list[int | None]:
        """The place of each entry among those of the state dict, in the order of ``names``."""
    def locate(self, wanted: Sequence[tuple[str, _Extent | None, int | None]]) -> list[int]:
        """The chunk for each (fqn, offset, hint)."""
    def map_file(self, file: int) -> FileMapping: ...
    def check_files(self, chunks: Sequence[int]) -> None: ...
    def describe(
        self, names: Sequence[str]
    ) -> list[tuple[int, str | None, tuple[int, ...]] | None]:
        """[(tensor, dtype or None for bytes, shape)], None where there is no such name."""
    def check_regions(
        self, regions: Sequence[tuple[int, _Extent, _Extent]], values: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Checks the data files of regions (tensor, offsets, sizes) and of values; returns [(region, offsets, sizes)] that no chunk holds."""
    def plan_plain(
        self,
        names: Sequence[str],
        tensors: Sequence[Any],
        types: tuple[type, ...],
        dtypes: Mapping[Any, str],
    ) -> tuple[Batch, list[int]]:
        """A batch that fills those of the tensors that lie in host memory as they are stored, and the places of all others."""
    def touching(self, tensor: int, offsets: _Extent, sizes: _Extent) -> list[Overlap]:
        """What chunks hold of a region; they need not hold all of it."""
    def read_chunks(self, fills: Sequence[Fill], **options: Unpack[_ReadOptions]) -> ReadStats:
        """Sources are chunks."""
    def read_regions(self, fills: Sequence[Fill], **options: Unpack[_ReadOptions]) -> ReadStats:
        """Sources are tensors."""
    def read_bytes(self, chunks: Sequence[int], **options: Unpack[_ReadOptions]) -> list[bytes]: ...
    def verify(
        self, *, threads: int, progress: Callable[[int], object] | None = None
    ) -> tuple[list[Damage], int, int]:
        """(damage, bytes hashed, bytes without a digest)."""
    def find_link_outside(self) -> Path | None:
        """A data file that is a link out of the folder, and so refused to who opens the index file without leave."""
    def copy(
        self,
        *,
        prefix: str | None,
        digests: bool,
        save_id: bytes,
        threads: int,
        progress: Callable[[int], object] | None = None,
    ) -> bytes: ...
    def verify_chunks(self, chunks: Sequence[int], **options: Unpack[_ReadOptions]) -> None: ...

@final
class Batch:
    """All destinations of one load, planned, and checked as far as they can be without reading. The caller keeps the tensors.

    Those that share memory are filled in several passes. Targets and parts are those of ``dcp_rs.transfer.target`` and ``dcp_rs.tensors.memory``.
    """

    def __new__(cls, index: Index) -> Batch: ...
    def __len__(self) -> int: ...
    def add(self, targets: Sequence[Any]) -> None:
        """Adds targets in host memory that hold what is stored, to be filled in place."""
    def add_device_target(self, number: int, target: Any, device: int, there: bool) -> None:
        """Adds a target that the caller fills through slabs, and calls ``number``; ``there``: its memory is there already."""
    def add_opaque(self, number: int, target: Any, parts: Sequence[Any]) -> None:
        """The same for a target that only its own class can fill, whose memory ``parts`` are."""
    def arrange(self) -> int:
        """Finds the passes, once all is added; repasses how many there are. What a later destination hides has none."""
    def divide(self, common: SharedSections) -> None:
        """Says what others want too, once the passes were found."""
    def wants(self, number: int) -> list[int]:
        """What goes through slabs in a pass, part by part: numbers for ``SlabReader.create``."""
    def opaque(self, number: int) -> list[int]:
        """Numbers of the targets that their own class fills in a pass."""
    def places(self, number: int) -> list[int]:
        """The places of all that is filled in a pass."""
    def at_once(self) -> list[int]:
        """The places of which all is filled in the first pass."""
    def leave_out(self, places: Sequence[int]) -> None:
        """Takes all of these places out of the passes."""
    def read(
        self,
        number: int,
        *,
        progress: Callable[[int], object] | None = None,
        **options: Unpack[_ReadOptions],
    ) -> ReadStats:
        """Fills what has this pass and is not elsewhere. ``progress`` hears now and then how many bytes of it are there."""

@final
class SharedSections:
    """Which sections of a checkpoint other ranks of the machine read too."""

@final
class Sample:
    """What a rank reads of a checkpoint, told in the same number of bytes for any model."""

    def __new__(cls, index: Index) -> Sample: ...
    def add_batch(self, batch: Batch) -> None:
        """Adds what is filled in place of a batch of the same index."""
    def add(self, regions: Sequence[tuple[int, bool, _Extent, _Extent]]) -> None:
        """Adds regions (source, whether that is a chunk, offsets, sizes). What no chunk holds is left out."""
    def told(self) -> bytes:
        """For the coordinator: 1 KiB."""
    def judged(self, answer: bytes) -> SharedSections | None:
        """With the coordinator's answer. None: it is none."""

def compare_wanted(told: Sequence[tuple[bytes, bytes]]) -> list[tuple[int, bytes]]:
    """The coordinator's part. For each rank that told (its machine, ``Wanted.told``): how many of that machine did, and the answer."""

@final
class SaveItem:
    """A chunk of a tensor, or a value (without ``dtype``), of ``length`` bytes. ``path`` and ``position`` are those in the state dict."""

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
    """The items that one rank holds: plain tensors, which are places in a list, then others."""

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
        """Adds those that are plain; returns the places of the others."""
    def add(self, items: Sequence[SaveItem]) -> None: ...
    def request(self) -> bytes:
        """What the coordinator has to know."""
    def kept_others(self, keep: bytes | None) -> list[int]:
        """Which of the items given to ``add`` this rank saves."""
    def create(
        self,
        folder: str,
        keep: bytes | None,
        lengths: Sequence[int],
        *,
        turns: Sequence[int] | None = None,
        reuse: Reuse | None = None,
        store: Store | None = None,
        **options: Unpack[_SaveOptions],
    ) -> Save:
        """A save of the plain tensors that this rank keeps, then of the others, whose lengths are given, and in which turn each is written."""
    def reuse(
        self,
        keep: bytes | None,
        lengths: Sequence[int],
        parent: Index | None,
        frozen: Sequence[bool],
        trusted: bool,
    ) -> Reuse:
        """What a parent may hold of that. ``frozen``, for each item: it never changes; ``trusted``: nor did it since the parent was saved."""
    def kept_names(self, keep: bytes | None) -> list[str]:
        """The names of the items that this rank saves."""

@final
class Copy:
    """Bytes of a slab, and the part of a target that they fill: one run of memory (``begin``), or a rectangle (``box``)."""

    @property
    def target(self) -> int: ...
    @property
    def want(self) -> int:
        """Its place among the wants that the reader was given."""
    @property
    def at(self) -> int:
        """First byte in the slab."""
    @property
    def nbytes(self) -> int: ...
    @property
    def begin(self) -> int | None:
        """First byte in the target, counted as its elements are stored."""
    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Offsets and sizes in the target."""

class SlabReader:
    """A load in progress: threads that fill slabs ahead of whoever empties them."""

    @staticmethod
    def create(
        batch: Batch,
        wants: Sequence[int],
        slab_bytes: int,
        *,
        sort: bool,
        **options: Unpack[_ReadOptions],
    ) -> SlabReader:
        """Of ``batch``; what goes to different devices does not share slabs."""
    @property
    def batch_count(self) -> int: ...
    @property
    def workers(self) -> int:
        """How many slabs are best filled at a time."""
    def batch(self, batch: int) -> tuple[int, list[Copy]]:
        """The number of the device, and the copies, in the order of their places."""
    def start(self, slabs: Sequence[tuple[int, int]], memory: object, workers: int) -> None:
        """Begin to fill slabs: (address, bytes) of memory that ``memory`` keeps alive. Addresses are multiples of 4096."""
    def next(self) -> tuple[int, int] | None:
        """(batch, slab), in order, once it is filled; None after the last."""
    def release(self, slab: int) -> None: ...
    def close(self) -> None:
        """Stops the load. After it no slab is touched."""
    def stats(self) -> ReadStats:
        """Once closed."""

@final
class Reuse:
    """The items that one rank saves, beside what a parent holds. It takes bytes as a ``Save`` does, and compares them."""

    def wanted(self) -> list[bool]:
        """For each item, whether its bytes are to be given."""
    def probed(self) -> list[bool]:
        """For each item, whether of its bytes the first block of 1 MiB is enough."""
    def write(self, parts: Sequence[Part]) -> None: ...
    def write_plain(
        self, tensors: list[Any], types: tuple[type, ...], dtypes: dict[Any, str]
    ) -> None:
        """Compares the plain tensors that are wanted."""
    def write_values(self, values: Sequence[tuple[int, bytes]]) -> None: ...
    def verify(self, threads: int) -> list[str]:
        """Reads what would be reused; what is damaged will be written. Says what is wrong."""
    def problems(self) -> list[str]:
        """Why files of the parent are not reused."""

@final
class Store:
    """A store, for one save: its commit replaces what was there when it began."""

    def __new__(cls, url: str, storage_options: Mapping[str, str]) -> Store: ...
    def begin(self, folder: str, rank: int | None) -> int:
        """Looks at what a save to ``folder`` will replace (with ``rank``, of that rank alone); the number of the save."""
    def has_index(self, folder: str, rank: int | None) -> bool:
        """Whether there is an index."""
    def discard(self, folder: str, rank: int | None, indexes: Sequence[bytes]) -> None:
        """As the function of this name, on the store, of what several ranks wrote."""
    def leftovers(self, folder: str, older_than: float | None) -> list[Leftover]:
        """As the function of this name, on the store."""
    def clean(
        self, folder: str, older_than: float | None
    ) -> tuple[list[Leftover], list[Leftover], list[str]]:
        """As the function of this name, on the store."""
    def list(
        self, folders: Sequence[str | Path]
    ) -> builtins.list[
        tuple[builtins.list[tuple[str, int, float, str | None]], builtins.list[str]]
    ]:
        """What is right in each: files (name, length, seconds since it was stored, tag), and names of folders."""
    def read(self, paths: Sequence[str | Path]) -> builtins.list[bytes | None]:
        """All bytes of each file; None of those that are not there."""
    def put(self, path: str | Path, data: bytes) -> None:
        """Stores a file, in place of one that has the name."""
    def asks_conditions(self, folder: str | Path) -> bool:
        """Whether it refuses to store what does not meet its condition: it is asked, once in a process."""
    def put_new(self, path: str | Path, data: bytes) -> None:
        """Stores a file of which there is none; of another's ``StoragePreconditionError``."""
    def has(self, path: str | Path, data: bytes) -> bool:
        """Whether a file has these bytes, and is the one that was seen before, if one was."""
    def upload_file(
        self,
        path: str | Path,
        to: str | Path,
        *,
        overwrite: bool,
        threads: int,
        max_inflight_bytes: int,
    ) -> None:
        """Stores a file of this machine under another name; without ``overwrite`` there must be none."""
    def upload_folder(
        self,
        files: Sequence[tuple[str | Path, str | Path]],
        last: tuple[str | Path, str | Path] | None,
        *,
        claim: tuple[str | Path, bytes],
        threads: int,
        max_inflight_bytes: int,
    ) -> None:
        """Stores files of this machine, from and to; then the last one, of which there must be none.

        What fails is removed, but where it cannot be told whether the last one is there, or where ``claim`` (a file, and what it holds) is another's.
        """
    def remove(self, paths: Sequence[str | Path]) -> None:
        """Removes files, where they are there; raises for the first that could not be, after all were tried."""
    def remove_seen(self, path: str | Path) -> None:
        """Removes a file that was read, where it is there; raises where it is another by now, which is left alone."""
    def replace_index(self, folder: str, index: bytes) -> None:
        """Stores an index over data that is there, in place of what there was when this was begun; removes nothing."""
    @property
    def keeps_conditions(self) -> bool:
        """Whether it refuses to replace what is not what it was."""
    @property
    def replaces(self) -> bool:
        """Whether there was an index when the save began."""
    @property
    def replaces_ranks(self) -> bool:
        """True if single ranks had indexes when the save of all ranks began. It replaces them."""

@final
class Save:
    """One rank's data files of one save."""

    @staticmethod
    def create(
        folder: str,
        items: Sequence[SaveItem],
        *,
        store: Store | None = None,
        **options: Unpack[_SaveOptions],
    ) -> Save:
        """Lays out the files for the items, and creates them."""
    @staticmethod
    def create_files(
        folder: str,
        files: Sequence[tuple[str, bytes, int]],
        values: Sequence[PlacedValue],
        *,
        crc32: bool = False,
        **options: Unpack[_WriteOptions],
    ) -> Save:
        """Files are (name, header, size), in the caller's own layout. ``finish`` returns nothing of use. With ``crc32``, :meth:`crc32s` does."""
    def write(self, parts: Sequence[Part]) -> None:
        """Parts of an item come in order; all but the last are multiples of 1 MiB."""
    def write_plain(
        self, tensors: list[Any], types: tuple[type, ...], dtypes: dict[Any, str]
    ) -> None:
        """Writes the plain tensors of the plan that this was created from, the first while others are looked at: one that is not as planned ends the save."""
    def write_values(self, values: Sequence[tuple[int, bytes]]) -> None:
        """Values are (item, bytes)."""
    def write_template(self, template: Template, first: int) -> None:
        """Writes the pieces of a template, which are the items from ``first`` on."""
    def crc32s(self) -> list[int]:
        """Of each item; of no use where it is not written yet."""
    def watch(self, progress: Callable[[int], object]) -> None:
        """From here on ``progress`` hears, while something is written, how many bytes are."""
    @property
    def plain_count(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Of what is written."""
    @property
    def bytes_reused(self) -> int:
        """Of what a parent holds, and is linked, or copied by a store."""
    @property
    def problems(self) -> list[str]:
        """Why files of the parent could not be linked, or copied."""
    @property
    def requests(self) -> int:
        """To a store: of parts, and for copies. 0 on a disk."""
    def reused(self) -> list[bool]:
        """For each item, whether it is reused: then it is not written."""
    def finish(
        self, nesting: list[tuple[int, tuple[Any, ...], str]] | None = None
    ) -> builtins.bytes:
        """Completes the files and returns an index over them, with containers as those of ``Index.nesting``. They stay claimed."""
    def let_go(self) -> None:
        """Ends the claim on the files."""
    def abort(self) -> list[str]:
        """Remove the files. Return why something is still on the store."""

def sum_regions(
    inputs: Sequence[tuple[Index, float]],
    sums: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int], int, bool]],
    *,
    double: bool,
    **options: Unpack[_ReadOptions],
) -> None:
    """For each sum: a tensor of each input, offsets and sizes, the address of the result, and whether it is of bfloat16."""

@final
class Template:
    """A stream that keeps what is written to it; but of the ``nbytes`` from ``address`` on it keeps the places, and does not read them."""

    def __new__(cls, address: int, nbytes: int) -> Template: ...
    def write(self, data: Buffer) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def holes(self) -> list[tuple[int, int, int]]:
        """(First byte in the file, distance from ``address``, length) of what is not kept."""
    def pieces(self) -> list[tuple[int, int]]:
        """(First byte in the file, length) of what is kept."""
    def seal(
        self,
        path: str,
        archives: Sequence[tuple[int, int]],
        filled: Sequence[tuple[int, int, int]],
        threads: int,
    ) -> None:
        """Enters the CRC-32 of all records of the zip archives (first byte, length); of ``filled`` (first byte, length, CRC-32), in order, it is known."""

def recover(
    folder: str,
    *,
    generation: int | None,
    save_id: bytes | None,
    threads: int,
    progress: Callable[[int], object] | None = None,
    store: Store | None = None,
) -> bytes: ...
def assign_saves(
    requests: Sequence[bytes], *, lowest_rank: bool
) -> tuple[list[bytes], int, list[int]]:
    """Who saves what: (for each rank a bit for each item of its request, the number of items of all, the bytes of each rank)."""

def commit_indexes(
    folder: str,
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
) -> tuple[Index, list[str]]:
    """Merges the indexes of all ranks and commits them; (the index, why files of the checkpoint before are still there).

    Without ``overwrite`` nothing is replaced. On a store, this is about indexes of single ranks: ``Store.begin`` says what the index itself may replace.
    """

def check_no_rank_indexes(folder: str) -> None:
    """Raises where a rank has an index of its own in the folder."""

def arm_fault(folder: str, at: int, errno: int) -> None:
    """From now on, in this process, the call number ``at`` (from 0) that changes something below ``folder`` fails with ``errno``."""

def disarm_fault() -> tuple[int, str | None] | None:
    """Ends it: how many calls there were, and the one that failed. None where nothing was armed."""

def has_native_data(folder: str) -> bool: ...
def next_generation(folder: str) -> int: ...
def available_cores() -> int:
    """Return the cores of this process: those of its affinity, and no more than its cgroup's quota pays for."""

def refusal(data: bytes) -> tuple[bool, str] | None:
    """Why torch should not unpickle a value: whether it is damaged, and what is wrong. None: it may."""

def block_digest(data: bytes) -> int:
    """XXH3-64, as the format has it."""

def create_folder(folder: str) -> None:
    """Creates a folder and those it is in, durably; one that is there is left as it is."""

def publish(folder: str, name: str, data: bytes, fsync: bool) -> None:
    """Gives ``data`` the name, in one step."""

@final
class Fingerprint:
    """What was at a path: a file, or a folder with what lies in it."""

def fingerprint(path: str) -> Fingerprint | None:
    """What is at a path now."""

def replace_index(folder: str, index: bytes, before: Fingerprint | None, fsync: bool) -> None:
    """Makes ``index`` that of the folder, in one step and under its lock, if the one there is what it was ``before``; removes nothing."""

def put_in_place(from_: str, to: str, before: Fingerprint | None) -> None:
    """Renames a finished file or folder in one step, in place of what was there ``before``, and of nothing else.

    That lies at ``from_`` or beside it then. An ``OSError`` with a ``filename2`` names where it is, if it could not be put back.
    """

LOCK_NAME: str

@final
class FolderLock:
    """The lock of a folder, for as long as this is there. A wait of more than `notice` seconds is logged."""

    def __init__(self, folder: str, *, notice: float = 10.0) -> None: ...

def leftovers(path: str, older_than: float | None) -> list[Leftover]:
    """What killed saves and conversions left; nothing is changed."""

def clean(path: str, older_than: float | None) -> tuple[list[Leftover], list[Leftover], list[str]]:
    """Removes what nobody needs: (what is gone, what was left alone, why other things could not be removed)."""

def discard(folder: str, rank: int | None, index: bytes) -> None:
    """Removes the data files that ``index`` names and the published one (with ``rank``, of that rank) does not."""
