"""Reads of data files that this rank does not see: other ranks read them, and send the bytes.

A rank that fails goes on: it asks for nothing more, and sends what its buffers hold, so that no
rank waits for it. It raises in the step that this is a part of, and so do all ranks.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.checkpoint.locate import Routes
from dcp_rs.engine.broadcast_read import KeptError, Piece, pieces
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.options import ReadOptions
from dcp_rs.transfer.target import Target

T = TypeVar("T")
#: A part of a chunk: the chunk, offsets, sizes and the dtype.
_Row = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]

#: Bytes of the buffers of a rank that sends, and the number of pieces on their way to each rank.
_BUFFER_BYTES, _ON_THE_WAY = 128 << 20, 3
_MAX_PIECE_BYTES, _MIN_PIECE_BYTES = 8 << 20, 64 << 10
_REQUEST, _DATA = 1, 2


class PeerReads:
    """Reads of one load by other ranks, and for them. All ranks make the same calls.

    Args:
        index: the index of the checkpoint.
        ranks: the ranks of the load.
        routes: the ranks that send to this one, and those that it sends to.
        options: how to read.

    Attributes:
        counts: the bytes that this rank got, and its reads for others.
    """

    def __init__(
        self, index: _core.Index, ranks: RankGroup, routes: Routes, options: ReadOptions
    ) -> None:
        self._index, self._ranks, self._routes = index, ranks, routes
        # Reads are small: further threads would wait for a core longer than they copy.
        self._options = replace(options, threads=1).engine()
        self._askers = sorted(routes.askers)
        self._sources = sorted(set(routes.sources.values()))
        room = _BUFFER_BYTES // (_ON_THE_WAY * max(1, routes.most))
        self._nbytes = max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, room))
        self._kept = KeptError()
        self.counts = Counts()

    @cached_property
    def _source_of_file(self) -> dict[int, int]:
        sources = self._routes.sources
        files = enumerate(self._index.files())
        return {number: sources[entry.name] for number, entry in files if entry.name in sources}

    def source_of(self, chunk: int) -> int | None:
        """Return the rank that sends a chunk; None if this rank reads it."""
        (file,) = self._index.files_of([chunk])
        return self._source_of_file.get(file)

    def values(self, chunks: Iterable[int]) -> dict[int, bytes]:
        """Return the bytes of values that other ranks read, by their chunks.

        Raises:
            Exception: as :meth:`fill`.
        """

        def answer(wanted: list[int]) -> dict[int, bytes]:
            data = self._index.read_bytes(wanted, **self._options)
            return dict(zip(wanted, data, strict=True))

        with self._ranks.talking():
            requests = self._messages(self._by_source(chunks, int), self._askers)
            answers = {to: self._kept.attempt(partial(answer, of)) for to, of in requests.items()}
            got = self._messages(answers, self._sources)
        self._kept.raise_it()
        found = {chunk: data for each in got.values() for chunk, data in (each or {}).items()}
        self.counts.wanted += sum(map(len, found.values()))
        return found

    def fill(self, targets: Iterable[Target]) -> None:
        """Fill parts of chunks that other ranks read. Others are left alone.

        Raises:
            Exception: the error of this rank, once no rank waits for it.
            RankLostError: a rank is gone.
        """
        with self._ranks.talking():
            asked = self._by_source(targets, attrgetter("index"))
            rows = {source: list(map(_row, own)) for source, own in asked.items()}
            requests = self._messages(rows, self._askers)
            self._exchange(requests, asked)
        self._kept.raise_it()
        self.counts.wanted += sum(t.nbytes for own in asked.values() for t in own)

    def _by_source(self, items: Iterable[T], chunk_of: Callable[[T], int]) -> dict[int, list[T]]:
        """Return the items that each source is asked for. An error ends the search for more."""
        found: dict[int, list[T]] = {source: [] for source in self._sources}

        def search() -> None:
            for item in items:
                if (source := self.source_of(chunk_of(item))) is not None:
                    found[source].append(item)

        self._kept.attempt(search)
        return found

    def _exchange(
        self, requests: Mapping[int, list[_Row]], asked: Mapping[int, list[Target]]
    ) -> None:
        """Send and receive a piece of each pair of ranks in each round."""
        sending = {to: pieces(list(map(_target, of)), self._nbytes) for to, of in requests.items()}
        getting = {source: pieces(own, self._nbytes) for source, own in asked.items()}
        buffers = {to: [_memory(self._nbytes) for _ in range(_ON_THE_WAY)] for to in sending}
        rounds: deque[list[Callable[[], object]]] = deque()
        for number in itertools.count():
            ends: list[Callable[[], object]] = []
            for source, piece in _next_of(getting):
                memory = piece.memory()
                buffer = _memory(piece.nbytes) if memory is None else memory
                ends.append(self._begin(dist.irecv, buffer, source, _DATA))
                ends.append(partial(self._kept.attempt, partial(piece.unpack, buffer)))
            for to, piece in _next_of(sending):
                buffer = buffers[to][number % _ON_THE_WAY][: piece.nbytes]
                self._kept.attempt(partial(self._read, piece, buffer))
                ends.append(self._begin(dist.isend, buffer, to, _DATA))
            rounds.append(ends)
            if not ends or len(rounds) == _ON_THE_WAY:
                for end in rounds.popleft():
                    end()
            if not any(rounds):
                return

    def _read(self, piece: Piece, buffer: torch.Tensor) -> None:
        self.counts.add(self._index.read_chunks(piece.reads(buffer), **self._options))

    def _messages(self, to: Mapping[int, T], of: Iterable[int]) -> dict[int, T]:
        """Send an object to each of some ranks. Return those that come from others."""
        ends: list[Callable[[], object]] = []
        for rank, value in to.items():
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            length = torch.tensor([len(data)], device="cpu")
            ends += [self._begin(dist.isend, part, rank, _REQUEST) for part in (length, data)]
        got = {}
        for rank in of:
            length = torch.zeros(1, dtype=torch.int64, device="cpu")
            self._begin(dist.irecv, length, rank, _REQUEST)()
            data = _memory(int(length))
            self._begin(dist.irecv, data, rank, _REQUEST)()
            got[rank] = pickle.loads(data.numpy().tobytes())  # noqa: S301  # sent by this job
        for end in ends:
            end()
        return got

    def _begin(
        self, way: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int
    ) -> Callable[[], object]:
        """Begin to send or to receive. Return what waits for the end of it."""
        ranks = self._ranks
        operation = dist.P2POp(way, tensor, ranks.global_rank(rank), ranks.process_group, tag)
        return dist.batch_isend_irecv([operation])[0].wait


def _memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _row(target: Target) -> _Row:
    return target.index, tuple(target.offsets), tuple(target.tensor.shape), target.dtype


def _target(row: _Row) -> Target:
    chunk, offsets, sizes, dtype = row
    tensor = torch.empty(sizes, dtype=dtype, device="meta")
    return Target(chunk, offsets, tensor, "", dtype, of_chunk=True)


def _next_of(pieces_of: dict[int, Iterator[Piece]]) -> Iterator[tuple[int, Piece]]:
    """Yield the next piece of each rank that has one left."""
    for rank, left in list(pieces_of.items()):
        if (piece := next(left, None)) is None:
            del pieces_of[rank]
        else:
            yield rank, piece
