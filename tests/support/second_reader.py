"""A second reader of the format, written from docs/format.md alone: plain Python, slow, and strict.

It shares no code with the package, so that the two agree only where the page says what both do. It
knows no torch either: tensors are (dtype name, shape, bytes in row-major order).
"""

import itertools
import json
import math
import re
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = b"\x89DCPRS\r\n"
BLOCK_SIZE = 1 << 20

# Section 6: code -> name, bytes, dtype in the header of a data file.
DTYPES = {
    1: ("bool", 1, "BOOL"),
    2: ("uint8", 1, "U8"),
    3: ("int8", 1, "I8"),
    4: ("int16", 2, "I16"),
    5: ("int32", 4, "I32"),
    6: ("int64", 8, "I64"),
    7: ("uint16", 2, "U16"),
    8: ("uint32", 4, "U32"),
    9: ("uint64", 8, "U64"),
    11: ("float16", 2, "F16"),
    12: ("float32", 4, "F32"),
    13: ("float64", 8, "F64"),
    14: ("bfloat16", 2, "BF16"),
    15: ("complex64", 8, "C64"),
    16: ("complex128", 16, "U8"),
    17: ("complex32", 4, "U8"),
    18: ("bcomplex32", 4, "U8"),
    19: ("float8_e4m3fn", 1, "F8_E4M3"),
    20: ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    21: ("float8_e5m2", 1, "F8_E5M2"),
    22: ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    23: ("float8_e8m0fnu", 1, "U8"),
    24: ("float4_e2m1fn_x2", 1, "U8"),
}


class FormatError(Exception):
    """The checkpoint breaks a rule of the page."""


def check(holds, rule):
    if not holds:
        raise FormatError(rule)


# --- XXH3-64, seed 0, from its specification

MASK = (1 << 64) - 1
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def u32(data, at):
    return struct.unpack_from("<I", data, at)[0]


def u64(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def fold(a, b):
    product = a * b
    return (product & MASK) ^ (product >> 64)


def avalanche(h):
    h ^= h >> 37
    h = h * PRIME_MX1 & MASK
    return h ^ (h >> 32)


def avalanche_64(h):
    h ^= h >> 33
    h = h * PRIME64_2 & MASK
    h ^= h >> 29
    h = h * PRIME64_3 & MASK
    return h ^ (h >> 32)


def swap64(x):
    return int.from_bytes(x.to_bytes(8, "little"), "big")


def mix16(data, at, secret):
    return fold(u64(data, at) ^ u64(SECRET, secret), u64(data, at + 8) ^ u64(SECRET, secret + 8))


def xxh3_64(data):
    size = len(data)
    if size == 0:
        return avalanche_64(u64(SECRET, 56) ^ u64(SECRET, 64))
    if size <= 3:
        joined = data[0] << 16 | data[size >> 1] << 24 | data[size - 1] | size << 8
        return avalanche_64(joined ^ u32(SECRET, 0) ^ u32(SECRET, 4))
    if size <= 8:
        joined = (u32(data, size - 4) + (u32(data, 0) << 32)) & MASK
        h = joined ^ u64(SECRET, 8) ^ u64(SECRET, 16)
        h ^= (h << 49 | h >> 15) & MASK ^ (h << 24 | h >> 40) & MASK
        h = h * PRIME_MX2 & MASK
        h ^= (h >> 35) + size
        h = h * PRIME_MX2 & MASK
        return h ^ (h >> 28)
    if size <= 16:
        low = u64(SECRET, 24) ^ u64(SECRET, 32) ^ u64(data, 0)
        high = u64(SECRET, 40) ^ u64(SECRET, 48) ^ u64(data, size - 8)
        return avalanche((size + swap64(low) + high + fold(low, high)) & MASK)
    if size <= 128:
        h = size * PRIME64_1
        for i in range((size - 1) // 32, -1, -1):
            h += mix16(data, 16 * i, 32 * i) + mix16(data, size - 16 * (i + 1), 32 * i + 16)
        return avalanche(h & MASK)
    if size <= 240:
        h = size * PRIME64_1
        for i in range(8):
            h += mix16(data, 16 * i, 16 * i)
        h = avalanche(h & MASK)
        for i in range(8, size // 16):
            h += mix16(data, 16 * i, 16 * (i - 8) + 3)
        h += mix16(data, size - 16, 136 - 17)
        return avalanche(h & MASK)
    return xxh3_64_long(data)


def xxh3_64_long(data):
    size = len(data)
    acc = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]

    def accumulate(at, secret):
        lanes = struct.unpack_from("<8Q", data, at)
        keys = struct.unpack_from("<8Q", SECRET, secret)
        for i in range(8):
            key = lanes[i] ^ keys[i]
            acc[i ^ 1] = (acc[i ^ 1] + lanes[i]) & MASK
            acc[i] = (acc[i] + (key & 0xFFFFFFFF) * (key >> 32)) & MASK

    stripes = (len(SECRET) - 64) // 8  # in a block of 1024 bytes
    blocks = (size - 1) // (64 * stripes)
    for block in range(blocks):
        for stripe in range(stripes):
            accumulate(block * 64 * stripes + stripe * 64, stripe * 8)
        keys = struct.unpack_from("<8Q", SECRET, len(SECRET) - 64)
        for i in range(8):
            acc[i] = ((acc[i] ^ acc[i] >> 47 ^ keys[i]) * PRIME32_1) & MASK
    done = blocks * 64 * stripes
    for stripe in range((size - 1 - done) // 64):
        accumulate(done + stripe * 64, stripe * 8)
    accumulate(size - 64, len(SECRET) - 64 - 7)
    h = size * PRIME64_1
    for i in range(4):
        h += fold(acc[2 * i] ^ u64(SECRET, 11 + 16 * i), acc[2 * i + 1] ^ u64(SECRET, 19 + 16 * i))
    return avalanche(h & MASK)


# --- section 5: values


def decode_value(data):
    """The value that fills `data` exactly; and for the root, see `decode_first`."""
    value, end = decode_at(data, 0)
    check(end == len(data), "a value ends exactly where its range does")
    return value


def is_key(value):
    """Whether a key of a dict may be this."""
    return not isinstance(value, (list, dict)) and (
        not isinstance(value, tuple) or all(map(is_key, value))
    )


def is_other_key(key):
    """Whether a key of a mapping that is no text may be this."""
    if type(key) is tuple:
        return all(type(item) is str or is_other_key(item) for item in key)
    return key is None or type(key) in (bool, int) or (type(key) is float and math.isfinite(key))


def is_part(part):
    """Whether a part of a path may be this."""
    return type(part) in (str, int) or (
        type(part) is tuple and len(part) == 1 and is_other_key(part[0])
    )


def check_nesting(nesting):
    check(nesting is None or isinstance(nesting, list), "nesting is none or a list")
    for container in nesting or []:
        check(type(container) is tuple and len(container) == 3, "a container is three values")
        position, path, kind = container
        check(type(position) is int and 0 <= position < 1 << 32, "a position")
        check(type(path) is tuple and all(map(is_part, path)), "a path, that may be empty")
        check(type(kind) is str, "a kind")


def path_of_json(part):
    return (key_of_json(part[0]),) if isinstance(part, list) and len(part) == 1 else part


def key_of_json(key):
    return tuple(map(key_of_json, key)) if isinstance(key, list) else key


def decode_at(data, at, depth=0):
    check(depth <= 64, "a value lies in at most 64 others")
    check(at < len(data), "a value within its range")
    tag, at = data[at], at + 1
    if tag in (0, 1, 2):
        return (None, False, True)[tag], at
    if tag in (3, 4):
        check(at + 8 <= len(data), "a number within its range")
        return struct.unpack_from("<q" if tag == 3 else "<d", data, at)[0], at + 8
    check(tag <= 9 and at + 4 <= len(data), "a tag of the table, and its count")
    count, at = u32(data, at), at + 4
    if tag in (5, 6):
        check(at + count <= len(data), "text within its range")
        raw = data[at : at + count]
        return (raw.decode("utf-8") if tag == 5 else raw), at + count
    items = []
    for _ in range(2 * count if tag == 9 else count):
        item, at = decode_at(data, at, depth + 1)
        items.append(item)
    if tag == 9:
        check(all(map(is_key, items[::2])), "a key holds no list and no dict")
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (tuple(items) if tag == 7 else items), at


# --- section 3: the index


@dataclass
class File:
    name: str
    external: bool
    size: int
    data_start: int
    head_digest: int | None
    mtime_ns: int
    linked: bool = False


@dataclass
class Chunk:
    file: File
    offset: int
    length: int
    offsets: tuple
    sizes: tuple
    strides: tuple | None
    digests: tuple | None


@dataclass
class Tensor:
    name: str
    is_bytes: bool
    dtype: str | None
    itemsize: int
    shape: tuple
    flags: int
    path: tuple | None
    split_dim: int | None
    position: int | None
    chunks: list


@dataclass
class SecondReader:
    """A checkpoint: `tensors` by name, and `root`."""

    folder: Path
    generation: int = 0
    save_id: bytes = b""
    files: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)
    root: object = None
    nesting: list | None = None
    is_rank_local: bool = False

    @classmethod
    def open(cls, folder, rank=None):
        """The checkpoint of all ranks; with `rank`, what that rank saved for itself, where there is none of all."""
        self = cls(Path(folder))
        index = self.folder / "index.dcprs"
        self.is_rank_local = rank is not None and not index.exists()
        if self.is_rank_local:
            index = self.folder / f"__{rank}.index.dcprs"
        self._parse(index.read_bytes())
        for file in self.files:
            self._check_file(file)
        return self

    def _parse(self, raw):
        check(len(raw) >= 256, "an index has a header")
        check(raw[:8] == MAGIC, "magic")
        check(u32(raw, 8) == 1, "version 1")
        check(u32(raw, 12) == 256, "header_len")
        check(u64(raw, 24) < 4, "incompat: two bits are defined")
        self.has_signs, self.has_links = bool(u64(raw, 24) & 1), bool(u64(raw, 24) & 2)
        check(u64(raw, 32) == len(raw), "file_len")
        check(u64(raw, 40) == xxh3_64(raw[:40] + bytes(8) + raw[48:]), "digest")
        self.save_id, self.generation = raw[48:64], u64(raw, 64)
        check(u64(raw, 72) == BLOCK_SIZE, "block_size")
        self.source = u64(raw, 80)
        check(self.source in (0, 1, 2), "source")
        names = ("files", "tensors", "chunks", "dims", "digests", "strings", "planner")
        widths = (64, 64, 48, 8, 8, 1, 1)
        section = {}
        for i, (name, width) in enumerate(zip(names, widths, strict=True)):
            offset, length = u64(raw, 96 + 16 * i), u64(raw, 104 + 16 * i)
            check(offset % 8 == 0, "sections begin at multiples of 8")
            check(offset >= 256 and offset + length <= len(raw), "sections within the file")
            check(length % width == 0, "sections of whole records")
            section[name] = raw[offset : offset + length]
        if u64(raw, 16) & 1:
            offset, length = u64(raw, 208), u64(raw, 216)
            check(
                offset % 8 == 0 and offset >= 256 and offset + length <= len(raw),
                "contents within the file",
            )
            check(
                length == len(section["chunks"]) // 3, "16 bytes of contents for each chunk of 48"
            )
        dims = struct.unpack(f"<{len(section['dims']) // 8}Q", section["dims"])
        digests = struct.unpack(f"<{len(section['digests']) // 8}Q", section["digests"])
        self._sections = section

        for at in range(0, len(section["files"]), 64):
            self.files.append(self._parse_file(section["files"], at))
        chunks = [
            self._parse_chunk_record(section["chunks"], at)
            for at in range(0, len(section["chunks"]), 48)
        ]
        self.root, end = decode_at(section["planner"], 0)
        self.nesting, _ = decode_at(section["planner"], end)
        check_nesting(self.nesting)
        next_chunk, last_name = 0, None
        for number, at in enumerate(range(0, len(section["tensors"]), 64)):
            record = section["tensors"]
            name = self._string(record, at)
            check(last_name is None or last_name.encode() < name.encode(), "sorted, no FQN twice")
            last_name = name
            kind, code, ndim, flags = record[at + 12 : at + 16]
            shape_at, first, count, path_at, path_len, split, position = struct.unpack_from(
                "<QQQQIII", record, at + 16
            )
            check(kind in (0, 1) and ndim <= 64, "kind and ndim")
            check(first == next_chunk, "chunks stand in the order of the tensors")
            next_chunk += count
            if kind == 1:
                check((code, ndim, count) == (0, 0, 1), "a value is one chunk without dims")
                dtype, itemsize = None, 1
            else:
                dtype, itemsize, _ = DTYPES[code]
                check(flags >> 2 & 3 != 3, "a memory format")
            check(shape_at + ndim <= len(dims), "shape within dims")
            shape = dims[shape_at : shape_at + ndim]
            check(
                math.prod(filter(None, shape)) * itemsize < 1 << 63,
                "a shape that can be multiplied",
            )
            path = None
            if path_len:
                planner = section["planner"]
                check(path_at + path_len <= len(planner), "path within planner")
                path = decode_value(planner[path_at : path_at + path_len])
                check(isinstance(path, tuple) and path, "a path is a tuple, and not empty")
                check(all(map(is_part, path)), "of keys and places")
            tensor = Tensor(
                name,
                kind == 1,
                dtype,
                itemsize,
                shape,
                flags,
                path,
                None if split == 0xFFFFFFFF else split,
                None if position == 0xFFFFFFFF else position,
                [],
            )
            for owner, file, offset, length, dims_at, digest_at, chunk_flags in chunks[
                first : first + count
            ]:
                check(owner == number, "a chunk knows its tensor")
                tensor.chunks.append(
                    self._chunk(
                        tensor, file, offset, length, dims_at, digest_at, chunk_flags, dims, digests
                    )
                )
            self._check_order(tensor)
            self.tensors[name] = tensor
        check(next_chunk == len(chunks), "the last tensor's chunks end the section")

    def _string(self, record, at):
        offset, length = u64(record, at), u32(record, at + 8)
        strings = self._sections["strings"]
        check(offset + length <= len(strings), "a name within strings")
        return strings[offset : offset + length].decode("utf-8")

    def _parse_file(self, record, at):
        name, flags = self._string(record, at), u32(record, at + 12)
        size, start, digest, mtime = struct.unpack_from("<QQQq", record, at + 16)
        external = bool(flags & 1)
        check(name and "\0" not in name, "a name of a file")
        if not external:
            check("\\" not in name and not name.startswith("/"), "a relative name")
            check(all(part not in ("", ".", "..") for part in name.split("/")), "parts of a name")
        check(start <= size, "data_start within the file")
        linked = bool(flags & 4)
        check(
            not linked or (self.has_links and self.source == 0 and not external),
            "a link, and the index says so",
        )
        return File(name, external, size, start, digest if flags & 2 else None, mtime, linked)

    @staticmethod
    def _parse_chunk_record(record, at):
        return struct.unpack_from("<IIQQQQI", record, at)

    def _chunk(self, tensor, file, offset, length, dims_at, digest_at, flags, dims, digests):
        check(file < len(self.files), "a chunk's file is there")
        file = self.files[file]
        ndim = len(tensor.shape)
        strided, digested, signs = flags & 1, flags & 2, flags >> 3 & 3
        check(
            not signs or (self.source != 0 and self.has_signs and not tensor.is_bytes),
            "only adopted tensors have signs",
        )
        check(
            not strided or (self.source != 0 and not tensor.is_bytes),
            "only adopted tensors have strides",
        )
        check(dims_at + ndim * (3 if strided else 2) <= len(dims), "a chunk's dims are there")
        offsets = dims[dims_at : dims_at + ndim]
        sizes = dims[dims_at + ndim : dims_at + 2 * ndim]
        strides = dims[dims_at + 2 * ndim : dims_at + 3 * ndim] if strided else None
        check(all(stride < 1 << 63 for stride in strides or ()), "strides of 63 bits")
        check(
            file.data_start <= offset and offset + length <= file.size, "a chunk lies in its file"
        )
        inside = all(
            o + s <= whole for o, s, whole in zip(offsets, sizes, tensor.shape, strict=True)
        )
        check(inside, "a chunk lies within its tensor")
        elements = 1
        for size in sizes:
            elements *= size
        if not tensor.is_bytes:
            if strides is None or elements == 0:
                expected = elements * tensor.itemsize
            else:
                last = sum((s - 1) * stride for s, stride in zip(sizes, strides, strict=True))
                expected = (last + 1) * tensor.itemsize
            check(length == expected, "a chunk's length is that of its elements")
        found = None
        if digested:
            blocks = -(-length // BLOCK_SIZE)
            check(digest_at + blocks <= len(digests), "a chunk's digests are there")
            found = digests[digest_at : digest_at + blocks]
        return Chunk(file, offset, length, offsets, sizes, strides, found)

    @staticmethod
    def _check_order(tensor):
        keys = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
        check(all(a < b for a, b in itertools.pairwise(keys)), "chunks sorted, none twice")
        if tensor.split_dim is None:
            return
        d = tensor.split_dim
        check(d < len(tensor.shape), "split_dim is a dimension")
        end = 0
        for chunk in tensor.chunks:
            for dim, whole in enumerate(tensor.shape):
                if dim != d:
                    check(
                        (chunk.offsets[dim], chunk.sizes[dim]) == (0, whole),
                        "split_dim: whole spans",
                    )
            check(chunk.offsets[d] >= end, "split_dim: a run")
            end = chunk.offsets[d] + chunk.sizes[d]

    # --- section 2: data files
    # ---------------------------------------------------------------------

    def _check_file(self, file):
        path = self.folder / file.name
        raw = path.read_bytes()
        check(len(raw) == file.size, "file_size")
        if file.head_digest is not None:
            check(xxh3_64(raw[: file.data_start]) == file.head_digest, "head_digest")
        if self.source != 0:
            return
        length = u64(raw, 0)
        check(8 + length == file.data_start, "the payload begins behind the header")
        check(file.data_start % 4096 == 0, "at a multiple of 4096")
        check(length <= 64 << 20, "a header of at most 64 MiB")
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__")
        check(metadata["format"] == "pt" and metadata["DCP_VERSION"] == "1.0", "__metadata__")
        sharding = json.loads(metadata["DCP_SHARDING_INFO"])
        own = json.loads(metadata["DCPRS"])
        if file.linked:
            check(own["version"] == 1, "DCPRS")
            self._check_linked(file, header, own)
            return
        check(own["version"] == 1 and own["generation"] == self.generation, "DCPRS")
        check(own["save_id"] == str(uuid.UUID(bytes=bytes(self.save_id))), "save_id")
        check(own["rank"] < own["world_size"] or own["world_size"] == 0, "rank and world_size")
        check((own["world_size"] == 0) == self.is_rank_local, "world_size of a rank-local save")
        check(own["file"] < own["files"], "file and files")
        check(f"g{own['generation']:08}-" == file.name[:10], "generation in the name")
        check(f"-r{own['rank']:05}-f{own['file']:05}.safetensors" == file.name[26:], "the name")
        place, alignment = 0, 4096
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            size = end - begin
            if size:  # empty ones may lie anywhere among the others of alignment 4096
                check(begin == place, "no gap")
                own_alignment = min(4096, size & -size)
                check(own_alignment <= alignment, "descending alignment")
                alignment, place = own_alignment, end
            self._check_entry(file, name, entry, sharding, own)
        check(file.data_start + place == file.size, "the payload ends the file")

    def _check_linked(self, file, header, own):
        """What file 0 of the rank says of a link, and that its header has the chunks that the index does."""
        first = self.folder / re.sub(r"-f[0-9]+\.safetensors$", "-f00000.safetensors", file.name)
        raw = first.read_bytes()
        about = json.loads(json.loads(raw[8 : 8 + u64(raw, 0)])["__metadata__"]["DCPRS"])
        check(
            about["save_id"] == str(uuid.UUID(bytes=bytes(self.save_id))),
            "save_id of the rank's first file",
        )
        number = int(re.search(r"-f([0-9]+)\.safetensors$", file.name)[1])
        (link,) = (link for link in about["linked"] if link["file"] == number)
        check(0 < number < about["files"], "a link is not the first file, and is counted")
        check(
            (link["size"], link["head"]) == (file.size, f"{file.head_digest:016x}"), "size and head"
        )
        chunks = [(t, c) for t in self.tensors.values() for c in t.chunks if c.file is file]
        check(len(chunks) > 0, "bytes that are reused")
        spans = ((name, entry["data_offsets"]) for name, entry in header.items())
        starts = {file.data_start + begin: name for name, (begin, end) in spans if end > begin}
        for tensor, chunk in chunks:
            check(
                any(
                    b <= chunk.offset and chunk.offset + chunk.length <= e for b, e in link["bytes"]
                ),
                "in bytes",
            )
            name = starts[chunk.offset]
            self._check_entry(file, name, header[name], self._offsets_in(file), own)
            check(
                tensor.name == (name[:-1] if name.startswith("__metadata__~") else name),
                "the same name",
            )
        reused = sum(chunk.length for _, chunk in chunks)
        check(
            sum(end - begin for begin, end in link["bytes"]) == reused, "nothing else is in bytes"
        )
        check(2 * reused >= file.size - file.data_start, "half of a linked file is reused")

    def _offsets_in(self, file):
        raw = (self.folder / file.name).read_bytes()
        return json.loads(json.loads(raw[8 : 8 + u64(raw, 0)])["__metadata__"]["DCP_SHARDING_INFO"])

    def _check_entry(self, file, name, entry, sharding, own):
        fqn = name[:-1] if name.startswith("__metadata__~") else name
        tensor = self.tensors[fqn]
        begin, end = entry["data_offsets"]
        at = file.data_start + begin, end - begin
        (chunk,) = (c for c in tensor.chunks if c.file is file and (c.offset, c.length) == at)
        told = own["tensors"].get(name)
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        if tensor.is_bytes:
            check((entry["dtype"], entry["shape"]) == ("U8", [chunk.length]), "a value is U8")
            check(told["kind"] == "bytes", "kind")
            check(sharding[name] == {"saved_offsets": [0]}, "saved_offsets of a value")
            return
        header_dtype = next(d[2] for d in DTYPES.values() if d[0] == tensor.dtype)
        if header_dtype == "U8" and tensor.itemsize > 1:
            offsets, sizes = [*offsets, 0], [*sizes, tensor.itemsize]
        check((entry["dtype"], entry["shape"]) == (header_dtype, sizes), "dtype and shape")
        check(sharding[name] == {"saved_offsets": offsets}, "saved_offsets")
        if told is None:
            check(tensor.path is None and tensor.flags == 0, "an entry that can be derived")
            check(chunk.sizes == tensor.shape, "of the whole tensor")
            check(header_dtype != "U8" or tensor.dtype == "uint8", "of the header's own dtype")
            return
        check(told["kind"] == "tensor" and told["dtype"] == tensor.dtype, "kind and dtype")
        check(
            tuple(told["shape"]) == tensor.shape and told["flags"] == tensor.flags, "shape, flags"
        )
        path = tuple(map(path_of_json, told["path"])) if "path" in told else None
        check(repr(path) == repr(tensor.path), "path")

    # --- reading
    # -----------------------------------------------------------------------------------

    def chunk_bytes(self, tensor, chunk):
        raw = (self.folder / chunk.file.name).read_bytes()[
            chunk.offset : chunk.offset + chunk.length
        ]
        if chunk.digests is not None:
            blocks = [raw[at : at + BLOCK_SIZE] for at in range(0, len(raw), BLOCK_SIZE)]
            for number, (block, digest) in enumerate(zip(blocks, chunk.digests, strict=True)):
                check(xxh3_64(block) == digest, f"digest of block {number} of {tensor.name!r}")
        return raw

    def read(self, name):
        """(dtype name, shape, bytes) of a tensor; bytes of a value."""
        tensor = self.tensors[name]
        if tensor.is_bytes:
            return self.chunk_bytes(tensor, tensor.chunks[0])
        elements = 1
        for size in tensor.shape:
            elements *= size
        out = bytearray(elements * tensor.itemsize)
        covered = 0
        for chunk in tensor.chunks:
            check(chunk.strides is None, "native chunks are contiguous")
            raw = self.chunk_bytes(tensor, chunk)
            covered += len(raw)
            place_rectangle(out, raw, tensor.shape, chunk.offsets, chunk.sizes, tensor.itemsize)
        check(covered == len(out), "the chunks hold the whole tensor")
        return tensor.dtype, tensor.shape, bytes(out)

    def state_dict(self):
        """Everything nested as it was saved, with (dtype name, shape, bytes) and bytes for leaves; only where that is known (`nesting`)."""
        makers = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
        kinds = {path: kind for _, path, kind in self.nesting}
        entries = [(position, 0, path, None) for position, path, _ in self.nesting]
        for tensor in self.tensors.values():
            where = tensor.path or self.paths().get(tensor.name, (tensor.name,))
            entries.append(
                (
                    math.inf if tensor.position is None else tensor.position,
                    1,
                    where,
                    self.read(tensor.name),
                )
            )

        def container(path):
            kind = kinds.get(path, "dict")
            return defaultdict() if kind.startswith("defaultdict") else makers.get(kind, dict)()

        root = container(())
        for _, is_leaf, path, value in sorted(entries, key=lambda entry: entry[:2]):
            at = root
            for depth, part in enumerate(path):
                key = part[0] if type(part) is tuple else part
                is_last = depth + 1 == len(path)
                is_there = key < len(at) if isinstance(at, list) else key in at
                if is_last and is_leaf:
                    made = value
                elif is_there:
                    at = at[key]
                    continue
                else:
                    made = (
                        []
                        if not is_last and type(path[depth + 1]) is int
                        else container(path[: depth + 1])
                    )
                if isinstance(at, list):
                    at.extend([None] * (key + 1 - len(at)))
                at[key] = made
                at = made
        return root

    def paths(self):
        """FQN to path, those of the root and, before them, tensors' own."""
        found = {t.name: t.path for t in self.tensors.values() if t.path is not None}
        return (self.root if isinstance(self.root, dict) else {}) | found


def place_rectangle(out, raw, shape, offsets, sizes, itemsize):
    """Copies a row-major rectangle to its place in the row-major whole."""
    if not raw:
        return
    if not shape:
        out[:] = raw
        return
    row = sizes[-1] * itemsize
    for number in range(len(raw) // row):
        rest, at, step = number, offsets[-1], shape[-1]
        for dim in reversed(range(len(shape) - 1)):
            rest, index = divmod(rest, sizes[dim])
            at += (offsets[dim] + index) * step
            step *= shape[dim]
        out[at * itemsize : at * itemsize + row] = raw[number * row : (number + 1) * row]
