"""Mutated files of torch, read by torch and by dcp-rs: ``python -m differential torch``.

Either may refuse a file. If both read it, they read the same.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import random
import resource
import signal
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import DcpRsError
from support import state_differences
from support.torch_files import archive, flat, rich_state, text

#: Seconds for one case, and cases of one process. torch may hang or crash.
PATIENCE, BATCH = 60, 100


class RefusedError(Exception):
    """One side does not read the case."""


def pieces(data: bytes) -> list[bytes]:
    """Return the opcodes of a pickle, each with its argument."""
    places = [at for _, _, at in pickletools.genops(data)]
    return [data[at:end] for at, end in zip(places, [*places[1:], len(data)], strict=True)]


def mutated(data: bytes, more: list[bytes], draw: random.Random) -> bytes:
    """Return a pickle with a few opcodes changed, moved, repeated or inserted."""
    ops = pieces(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        at, other = draw.randrange(1, len(ops) - 1), draw.randrange(1, len(ops) - 1)
        change = draw.randrange(7)
        if change == 0:
            ops[at] = ops[other]
        elif change == 1:
            ops[at], ops[other] = ops[other], ops[at]
        elif change == 2:
            ops.insert(at, ops[other])
        elif change == 3:
            del ops[at]
        elif change == 4:
            ops.insert(at, draw.choice(more))
        elif change == 5 and len(ops[at]) > 1:
            byte = draw.randrange(1, len(ops[at]))
            ops[at] = ops[at][:byte] + bytes([draw.randrange(256)]) + ops[at][byte + 1 :]
        else:
            first, last = sorted((at, min(other, at + 12)))
            ops[draw.randrange(1, len(ops) - 1) : 0] = ops[first:last]
        if len(ops) < 4:
            break
    return b"".join(ops)


#: Opcodes to insert: states and attributes, marks and stacks, calls and the memo.
TORCH = [
    *(b"b", b"R", b"\x81", b"s", b"u", b"a", b"e", b"(", b"t", b")", b"\x85", b"\x86", b"\x87"),
    *(b"}", b"]", b"N", b"\x88", b"\x89", b"\x8f", b"Q"),
    *(b"h%c" % number for number in range(64)),
    *(b"q%c" % number for number in range(64)),
    *(b"K%c" % number for number in (0, 1, 2, 4)),
    *map(text, ("data", "requires_grad", "real", "conj", "neg", "0", "1", "w", "cpu", "storage")),
    *(
        b"c%s\n" % name
        for name in (
            b"collections\nOrderedDict",
            b"collections\nCounter",
            b"torch.nn.parameter\nParameter",
            b"torch\nFloatStorage",
            b"torch\nIntStorage",
            b"torch\nTensor",
            b"torch\nSize",
            b"torch._utils\n_rebuild_tensor_v2",
            b"torch._utils\n_rebuild_parameter",
            b"torch._utils\n_rebuild_parameter_with_state",
            b"torch._tensor\n_rebuild_from_type_v2",
        )
    ),
    b"}" + text("data") + b"h\x05s",
    b"}" + text("neg") + b"\x88s",
]
METADATA = [op for op in TORCH if op[0] not in b"cq"] + [b"\x94", b"\x93", b"\x90", b"0"]


def states() -> Iterator[dict[str, Any]]:
    """Yield small states whose files have every kind of call."""
    base = torch.arange(12.0).reshape(3, 4)
    noted = torch.nn.Parameter(torch.ones(3))
    noted.note = "x"
    plain = torch.arange(3)
    plain.note = [1]
    yield {"w": base, "t": base.t(), "part": base[1:, 2:], "i": torch.arange(4)}
    yield {"p": torch.nn.Parameter(base), "noted": noted, "plain": plain}
    yield {
        "c": torch.ones(2, dtype=torch.complex64).conj(),
        "neg": torch.ones(2).cfloat().conj().imag,
    }
    yield {"list": [base, {"a": torch.ones(1)}], 1: "one", False: "no", "t": (base,), "s": {1, 2}}
    yield {"count": collections.Counter("aab"), "o": collections.OrderedDict(a=base, b=noted)}
    rich = rich_state()
    for dropped in ("shapes", "quantized"):
        del rich[dropped]
    yield rich


class TorchFiles:
    """Files of ``torch.save``: the values of all entries.

    The nested states are compared. An entry of dcp-rs may be a dict: one with keys such as tuples.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "m.pt"
        self.seeds = []
        for state in states():
            buffer = io.BytesIO()
            torch.save(state, buffer)
            with zipfile.ZipFile(buffer) as file:
                inside = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
            records = [(name, data) for name, data in inside.items() if name.startswith("data/")]
            self.seeds.append((inside["data.pkl"], records))

    def compare(self, draw: random.Random) -> list[str]:
        data, records = draw.choice(self.seeds)
        made = archive(mutated(data, TORCH, draw), records)
        self.path.write_bytes(made)
        try:
            with dcp_rs.open(self.path) as checkpoint:
                got = checkpoint.state_dict(copy=True)
        except DcpRsError:
            raise RefusedError from None
        try:
            want = flat(torch.load(io.BytesIO(made), weights_only=True))
        except Exception:  # noqa: BLE001 - it may raise anything
            raise RefusedError from None
        return differences(flat(got), want)


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Return what differs. Whether a gradient is required is no part of the data."""
    for state in (got, want):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                state[name] = torch.Tensor.detach(value).as_subclass(torch.Tensor)
            elif isinstance(value, set):  # it finds tensors by identity
                state[name] = sorted(map(repr, value))
    found = [str(one) for one in state_differences(got, want)]
    # A storage that is no tensor's is compared by its pickle, which contains its address.
    return [one for one in found if "protocol_version" not in one]


class Unpickler(pickle.Unpickler):
    """One that makes metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") or (module, name) in (
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
        ):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(name)


class Metadata:
    """The ``.metadata`` of stock DCP: names, dtypes, shapes, chunks and places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stock"
        base = torch.arange(12.0).reshape(3, 4)
        state = {"m": {"w": base, "b": torch.ones(3)}, "opt": {"state": {0: {"step": 1}}}, "v": "x"}
        dcp.save(state, checkpoint_id=self.folder, no_dist=True)
        known = (self.folder / ".metadata").read_bytes()
        value = pickle.loads(known)
        self.seeds = [pickle.dumps(value, protocol) for protocol in (2, 4)]

    def compare(self, draw: random.Random) -> list[str]:
        made = mutated(draw.choice(self.seeds), METADATA, draw)
        (self.folder / ".metadata").write_bytes(made)
        try:
            index = _core.Index.open(os.fspath(self.folder), None, allow_external=False)
        except DcpRsError:
            raise RefusedError from None
        try:
            metadata = Unpickler(io.BytesIO(made)).load()
            want = described(metadata)
        except Exception:  # noqa: BLE001 - it may raise anything
            raise RefusedError from None
        files = [file.name for file in index.files()]
        got = {}
        for number, name in enumerate(index.names()):
            entry, chunks = index.tensor(number), index.chunks(number)
            places = {(c.offsets, c.sizes, files[c.file]) for c in chunks if 0 not in c.sizes}
            got[name] = (entry.dtype, None if entry.is_bytes else entry.shape, places)
        return [
            f"{n}: {got.get(n)} and {want.get(n)}" for n in got | want if got.get(n) != want.get(n)
        ]


def described(metadata: Any) -> dict[str, Any]:
    """Return name, dtype, shape, and the files of all chunks, as torch's reader sees them."""
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.metadata.BytesStorageMetadata):
            place = metadata.storage_data[dcp.metadata.MetadataIndex(name)]
            found[name] = (None, None, {((), (), place.relative_path)})
            continue
        places = set()
        for chunk in entry.chunks:
            if 0 in chunk.sizes:
                continue
            index = dcp.metadata.MetadataIndex(name, chunk.offsets)
            file = metadata.storage_data[index].relative_path
            places.add((tuple(chunk.offsets), tuple(chunk.sizes), file))
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        found[name] = (dtype, tuple(entry.size), places)
    return found


KINDS: dict[str, Callable[[Path], Any]] = {"torch": TorchFiles, "metadata": Metadata}


def _run_cases(kind: str, number: int, out: Path) -> None:
    """Run the cases of one seed, and write what came of them. A later process reads it."""
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    warnings.simplefilter("ignore")
    subject = KINDS[kind](out.parent)
    for case in range(BATCH):
        draw = random.Random(f"{kind} {number} {case}")
        out.write_text(f"{case}")
        signal.alarm(PATIENCE)
        try:
            found = subject.compare(draw)
            outcome = "differ" if found else "read by both"
        except RefusedError:
            found, outcome = [], "refused"
        except Exception as error:  # noqa: BLE001 - a fault of the comparison
            found, outcome = [repr(error)], "not compared"
        signal.alarm(0)
        with out.with_suffix(".log").open("a") as log:
            log.write(f"{outcome}\n")
            for line in found[:3]:
                log.write(f"  case {case}: {line[:300]}\n")


def run(kind: str, number: int, tally: collections.Counter[str]) -> None:
    """Run the cases of one seed in a process of their own, and count what came of them.

    Raises:
        AssertionError: torch and dcp-rs read something different, or could not be compared.
    """
    with tempfile.TemporaryDirectory(prefix="differential-") as folder:
        out = Path(folder) / "case"
        child = os.fork()
        if child == 0:
            try:
                _run_cases(kind, number, out)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            tally[f"ended by signal {os.WTERMSIG(status)}"] += 1
            print(f"--seed {number}, case {out.read_text()}: signal {os.WTERMSIG(status)}")
        log = out.with_suffix(".log")
        lines = log.read_text().splitlines() if log.exists() else []
    outcomes = [line for line in lines if not line.startswith("  ")]
    tally.update(outcomes)
    tally["cases"] += len(outcomes)
    differences = [line for line in lines if line.startswith("  ")]
    assert not differences, "\n".join(differences)
