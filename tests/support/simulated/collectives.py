"""``simccl``: process groups for the simulated device that order themselves by streams, as NCCL's do.

What is sent is read, and what is received is there, when a stream comes by, not when a call
returns: waiting for the work makes the current stream wait.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Backend

from support.simulated import install

if TYPE_CHECKING:
    from datetime import timedelta


class _Work(dist.Work):
    """Done when a stream has come so far. Until then it keeps the memory."""

    def __init__(self, stream: torch.Stream | None, *memory: torch.Tensor) -> None:
        super().__init__()
        self._event = None if stream is None else stream.record_event()
        self._memory = memory

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._event is not None:
            self._event.wait(torch.accelerator.current_stream(self._event.device))
        self._memory = ()
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


#: Tensors that were sent from rank to rank by ``simccl``, by this process.
sent: list[int] = [0]


class _Simccl(Backend):
    # The bindings' own properties ask the Python object, which asks the property, without an end.
    supports_coalescing = False
    options = Backend.Options("simccl")

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._simulated = install()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # For each peer and direction, so that what two ranks send each other does not wait for what
        # they receive.
        self._lanes: dict[
            tuple[str, int, torch.device], tuple[torch.Stream, ThreadPoolExecutor]
        ] = {}

    def getBackendName(self) -> str:  # noqa: N802
        return "simccl"

    def _lane(
        self, way: str, peer: int, device: torch.device
    ) -> tuple[torch.Stream, ThreadPoolExecutor]:
        lane = self._lanes.get((way, peer, device))
        if lane is None:
            lane = self._lanes[way, peer, device] = (
                torch.Stream(device=device),
                ThreadPoolExecutor(1, "simccl"),
            )
        lane[0].wait_stream(torch.accelerator.current_stream(device))
        return lane

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> _Work:
        (tensor,) = tensors
        sent[0] += 1
        stream, thread = self._lane("to", dst, tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with stream:
            host.copy_(tensor, non_blocking=True)
        copied, gate = stream.record_event(), self._simulated.gate(stream)

        def run() -> None:
            try:
                copied.synchronize()
                self._gloo.send([host], dst, tag).wait()
            finally:
                self._simulated.open(gate)

        thread.submit(run)
        return _Work(stream, tensor)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> _Work:
        (tensor,) = tensors
        stream, thread = self._lane("from", src, tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        gate = self._simulated.gate(stream)
        with stream:
            tensor.copy_(host, non_blocking=True)

        def run() -> None:
            try:
                self._gloo.recv([host], src, tag).wait()
            finally:
                self._simulated.open(gate)

        thread.submit(run)
        return _Work(stream, tensor)

    # The others wait: they carry what ranks agree on, not tensors.

    def _by_host(self, what: str, results: list[torch.Tensor], *arguments: Any) -> _Work:
        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return copies.setdefault(id(value), value.cpu())
            return [moved(entry) for entry in value] if isinstance(value, list) else value

        copies: dict[int, torch.Tensor] = {}
        getattr(self._gloo, what)(*map(moved, arguments)).wait()
        for tensor in results:
            tensor.copy_(copies[id(tensor)])
        return _Work(None)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._by_host("broadcast", tensors, tensors, opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._by_host("allreduce", tensors, tensors, opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> _Work:
        return self._by_host("allgather", outputs[0], outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> _Work:
        parts = list(output.view(self.size(), *tensor.shape).unbind())
        return self.allgather([parts], [tensor], AllgatherOptions())

    _allgather_base = all_gather_single

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> _Work:
        return self._by_host("gather", outputs[0] if outputs else [], outputs, inputs, opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> _Work:
        return self._by_host("scatter", outputs, outputs, inputs, opts)

    def barrier(self, opts: Any) -> _Work:
        self._gloo.barrier().wait()
        return _Work(None)


def register() -> None:
    """Makes ``simccl`` a backend, for the simulated device."""
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", _Simccl, devices=["sim"])
