"""Saves from a device: its tensors come down into pinned slabs, some of which are written while copies go on into others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.options import WriteOptions
from dcp_rs.transfer import slabs
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.lanes import Lane, Transfer, lane_for
from dcp_rs.transfer.parts import ALIGNMENT, BLOCK_BYTES, Part, flat, gathered, pack

__all__ = ["write_from_device"]


def write_from_device(
    save: _core.Save | _core.Reuse, device: torch.device, entries: Sequence[tuple[int, Entry]], options: WriteOptions
) -> None:
    """Writes tensors of one device: (item of ``save``, entry) each. They are those that the caller's current stream makes."""
    max_bytes = options.inflight_bytes(accelerator=True)
    nbytes = slabs.slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(entry.nbytes for _, entry in entries)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    taken = slabs.kept.take(count, nbytes, pinned=True)
    free = list(reversed(taken))
    lane = lane_for(device)
    copying: deque[tuple[torch.Tensor, list[Part], Transfer, Any]] = deque()
    filled = pack(entries, nbytes)
    try:
        while True:
            while free and (parts := next(filled, None)):
                slab = free.pop()
                transfer = _transfer(slab, lane, parts)
                # It may read what the caller's stream is still conjugating. Until it is done, somebody has to keep that.
                lane.order_after_caller()
                copying.append((slab, parts, transfer, lane.download(slab, transfer)))
            if not copying:
                break
            # Half of what there is: the disk gets large writes, and the copies to the other half go on meanwhile.
            ready = [copying.popleft() for _ in range(min(len(copying), max(1, count // 2)))]
            for *_, token in ready:
                lane.wait(token)
            save.write([part.write_from(slab.data_ptr()) for slab, parts, *_ in ready for part in parts])
            free += [slab for slab, *_ in ready]
    finally:
        lane.order_before_caller()
        for *_, token in copying:
            lane.wait(token)
    slabs.kept.give(taken)


def _transfer(slab: torch.Tensor, lane: Lane, parts: Sequence[Part]) -> Transfer:
    """The copies of the parts into the slab.

    What lies on the device as it is written comes straight, if it is large. The rest is gathered in the scratch memory first, where it
    is cast as well: that takes no other memory, be the tensor strided as it may.
    """
    transfer = Transfer()
    together: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    scratch: torch.Tensor | None = None
    for part in parts:
        begin, end = part.at, part.stop
        whole = flat(part.entry)
        if whole is not None and end - begin >= BLOCK_BYTES:
            transfer.direct.append((slab[begin:end], whole[part.begin : part.end]))
            continue
        if scratch is None:
            scratch = lane.scratch(slab)
        if transfer.runs and begin - transfer.runs[-1][1] < ALIGNMENT:
            transfer.runs[-1] = (transfer.runs[-1][0], end)
        else:
            transfer.runs.append((begin, end))
        if whole is not None:
            together[0].append(scratch[begin:end])
            together[1].append(whole[part.begin : part.end])
        else:
            transfer.single += gathered(part, scratch[begin:end])
    if together[0]:
        transfer.grouped.append(together)
    return transfer
