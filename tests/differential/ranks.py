"""What rank processes do with a case: both save it, both load it, and the results are compared where they are."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from differential import bodies
from differential.cases import Holder, Load, RankGroup, Save, Tensor
from support import blank, random_tensor, state_differences
from support.hooks import WAYS, inner

_WAYS = {way.__name__: way for way in WAYS}
#: The element of four bits, which torch neither fills nor casts; None in an older torch.
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


@dataclass
class Result:
    """What one of the two did on one rank.

    Attributes:
        who: ``"stock"``, ``"ours"``, or ``"ours of stock's"``.
        errors: types of what it raised, of all ranks; empty where it went well.
        message: of the error.
        differences: from what stock did.
    """

    who: str
    errors: tuple[str, ...] = ()
    message: str = ""
    differences: list[str] = field(default_factory=list)


class _Stateful:
    """A value that knows its state."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


# --- tensors


class _Builder:
    """Makes a state dict of its description, on this rank."""

    def __init__(self, ranks: RankGroup, *, seed: int = 0, empty: Load | None = None) -> None:
        self._ranks = ranks
        self._mesh: DeviceMesh | None = None
        self._seed = seed
        self._empty = empty
        self._tied: dict[Any, torch.Tensor] = {}

    def build(self, node: Any, *, in_list: bool = False) -> Any:
        if isinstance(node, Tensor):
            return self._tensor(node)
        if isinstance(node, Holder):
            return _Stateful(self.build(node.state))
        if isinstance(node, dict):
            return {key: self.build(value) for key, value in node.items() if self._has(value)}
        if isinstance(node, list) and any(_has_tensors(value) for value in node):
            return [self.build(value, in_list=True) for value in node]
        if self._empty is not None and not (isinstance(node, dict) and not node):
            return None
        return copy.deepcopy(node)

    def _has(self, node: Any) -> bool:
        is_own = isinstance(node, Tensor) and node.kind == "own"
        return not is_own or dist.get_rank() == node.number % dist.get_world_size()

    def _form(self, spec: Tensor) -> str:
        if self._empty is None:
            return spec.form
        if spec.form.startswith("tied"):
            return spec.form
        form = self._empty.forms.get(spec.number % 4, "plain")
        return form if form != "parameter" or spec.dtype.is_floating_point else "plain"

    def _values(self, spec: Tensor) -> torch.Tensor:
        made = random_tensor(spec.shape, spec.dtype, seed=spec.number + 1000 * self._seed)
        if self._empty is None:
            return made
        made = blank(made)
        cast = self._empty.cast
        if cast is not None and spec.dtype.is_floating_point and _FLOAT4 not in (spec.dtype, cast):
            made = torch.full(made.shape, -3, dtype=cast)
        return made

    def _tensor(self, spec: Tensor) -> torch.Tensor:
        values, form = self._values(spec), self._form(spec)
        if spec.kind == "dtensor":
            return self._dtensor(spec, values, form)
        if spec.kind == "sharded" and spec.shape and spec.shape[0]:
            return self._sharded(values, form)
        if form.startswith("tied"):
            key = spec.number, spec.shape, spec.dtype, spec.kind
            first = self._tied.setdefault(key, values)
            return first if form == "tied" else first.view(first.shape)
        return _laid_out(values, form)

    def _dtensor(self, spec: Tensor, values: torch.Tensor, form: str) -> torch.Tensor:
        if self._mesh is None:
            self._mesh = init_device_mesh("cpu", self._ranks.mesh)
        codes = self._ranks.places[spec.number % len(self._ranks.places)]
        # torch has not implemented for these what it divides by, to make a pending sum, and what it
        # pads uneven shards with.
        halves = values.dtype in (torch.complex32, getattr(torch, "bcomplex32", None))
        tiny = values.dtype.is_floating_point and values.dtype.itemsize == 1
        exact = not (
            values.dtype.is_floating_point or values.dtype.is_complex
        )  # of which it makes float32
        codes = ["R" if code == "P" and (halves or tiny or exact) else code for code in codes]
        places = [
            _placement(code, values.dim()) for code, _ in zip(codes, self._ranks.mesh, strict=False)
        ]
        bits = values.view(torch.int32) if halves else values
        bits = bits.view(torch.uint8) if bits.dtype == _FLOAT4 else bits
        whole = distribute_tensor(bits, self._mesh, places, src_data_rank=None)
        local = _laid_out(
            whole.to_local().view(values.dtype), "plain" if form == "parameter" else form
        )
        made = DTensor.from_local(
            local, self._mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return torch.nn.Parameter(made) if form == "parameter" else made

    def _sharded(self, values: torch.Tensor, form: str) -> ShardedTensor:
        rank, size, rows = dist.get_rank(), dist.get_world_size(), values.shape[0]
        each = -(-rows // size)
        first = min(rank * each, rows)
        local = values[first : first + each]
        shards = []
        if local.shape[0]:
            local = _laid_out(
                local, form if form == "offset" else "plain"
            )  # contiguous, as ShardedTensors have to be
            shards = [
                ShardOfTensor.from_tensor_and_offsets(
                    local, [first] + [0] * (values.dim() - 1), rank
                )
            ]
        return init_from_local_shards(shards, *values.shape)


def _has_tensors(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_has_tensors, node.values()))
    return isinstance(node, Tensor) or (isinstance(node, list) and any(map(_has_tensors, node)))


def _placement(code: str, dims: int) -> Any:
    if code == "P":
        return Partial()
    dim = int(code[1]) if code[0] == "S" else dims
    return Shard(dim) if dim < dims else Replicate()


def _laid_out(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same values (of ``expanded``: some of them, repeated), in memory of another form."""
    order = list(reversed(range(values.dim())))
    if form == "parameter":
        return torch.nn.Parameter(values.clone())
    if form == "transposed":
        return values.permute(order).contiguous().permute(order)
    if form == "steps" and values.dim():
        made = torch.empty((*values.shape[:-1], 2 * values.shape[-1]), dtype=values.dtype)[..., ::2]
        return made.copy_(values)
    if form == "offset":
        made = torch.empty(values.numel() + 3, dtype=values.dtype)[3:].view(values.shape)
        return made.copy_(values)
    if form == "expanded" and values.dim() and values.shape[0]:
        return values[:1].expand(values.shape)
    if form == "conj":
        return values.conj()
    if form == "neg":
        return torch._neg_view(values)
    return values.clone()


# --- both


def _planner(step: Save | Load, *, stock: bool) -> Any:
    table, theirs, ours = (
        (bodies.SAVES, DefaultSavePlanner, RsSavePlanner)
        if isinstance(step, Save)
        else (bodies.LOADS, DefaultLoadPlanner, RsLoadPlanner)
    )
    options = dict(step.options)
    if stock or step.planner == "torch" or step.hook is not None:
        # torch's own cache goes by the planner's class, across process groups
        # (docs/differences.md).
        options.pop("enable_plan_caching", None)
    kind = theirs if stock or step.planner == "torch" else ours
    if step.hook is None:
        return kind(**options)
    body, way = step.hook
    return _WAYS[way](kind, *table[body], None, **options)


def _attempt(result: Result, run: Any) -> Result:
    logging.disable(logging.CRITICAL)  # torch logs every failure with its stack
    try:
        with warnings.catch_warnings(action="ignore"):
            run()
    except CheckpointException as error:
        causes = [wrapped[0] for wrapped in error.failures.values()]
        result.errors = tuple(sorted({type(cause).__name__ for cause in causes}))
        result.message = "; ".join(str(cause) for cause in causes)[:500]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is judged
        result.errors = (type(error).__name__,)
        result.message = str(error)[:500]
    finally:
        logging.disable(logging.NOTSET)
        # What torch's planner sets while it looks for names of before 2.4, and leaves so where that
        # fails: whatever it flattens next is flattened as then.
        _version._derived_version = None
    return result


def save_step(save: Save, state: Any, folder: Path, seed: int) -> list[Result]:
    """Saves the state with both, over what is there."""
    torch.set_num_threads(1)
    results = [Result("stock"), Result("ours")]
    for time in range(save.times):
        for result in results:
            if result.errors:
                continue
            stock = result.who == "stock"
            made = _Builder(save.ranks, seed=seed + time).build(state)
            planner, path = _planner(save, stock=stock), folder / result.who
            if stock or save.through == "dcp" or save.hook or save.options:
                writer = dcp.FileSystemWriter(path) if stock else RsWriter(path, fsync=False)
                _attempt(result, lambda: dcp.save(made, storage_writer=writer, planner=planner))  # noqa: B023
            else:
                _attempt(result, lambda: dcp_rs.save(made, path, fsync=False))  # noqa: B023
            dist.barrier()
    return results


def load_step(load: Load, state: Any, folder: Path, has_ours: bool) -> list[Result]:
    """Loads stock's folder with stock, and both folders with ours, and compares."""
    torch.set_num_threads(1)
    own = load.through == "dcp_rs" and load.hook is None
    want: Any = None
    results = []
    for who, path in (("stock", "stock"), ("ours", "ours"), ("ours of stock's", "stock")):
        if who == "ours" and not has_ours:
            continue
        result = Result(who)
        made = _Builder(load.ranks, empty=load).build(state)
        for change in load.changes:
            if change == "+":
                made["one more"] = torch.zeros(2)
            else:
                made.pop(change[1:], None)
        planner = _planner(load, stock=who == "stock")
        if who == "stock":
            reader: Any = dcp.FileSystemReader(folder / path)
            _attempt(result, lambda: dcp.load(made, storage_reader=reader, planner=planner))  # noqa: B023
        elif not own:
            reader = RsReader(folder / path, **load.reader)
            _attempt(result, lambda: dcp.load(made, storage_reader=reader, planner=planner))  # noqa: B023
        else:
            call = partial(dcp_rs.load, made, folder / path, **load.options, **load.reader)
            _attempt(result, call)
        got = {
            "state": _comparable(made, as_text=own or load.planner == "ours"),
            "seen": vars(inner(planner)).get("seen"),
            "values": _values(planner),
        }
        if who == "stock":
            want = got
        elif not results[0].errors and not result.errors:
            result.differences = state_differences(got, want)[:8]
        results.append(result)
        dist.barrier()
    return results


def _values(planner: Any) -> list[str]:
    return sorted(vars(inner(planner)).get("values", []))


def _comparable(node: Any, *, as_text: bool) -> Any:
    """The tree, with what the comparison does not know taken apart.

    With ``as_text``, keys are text: torch's planner fills the tensors under 0, and puts values that
    were read under "0" beside it; `RsLoadPlanner` and `dcp_rs.load` fill what is there
    (docs/differences.md).
    """
    if isinstance(node, _Stateful):
        return {"loads": node.loads, "state": _comparable(node.state, as_text=as_text)}
    if isinstance(node, dict):
        made: dict[Any, Any] = {}
        for key, value in node.items():
            name = str(key) if as_text else key
            made[name] = _joined(made.get(name), _comparable(value, as_text=as_text))
        return made
    if isinstance(node, list):
        return [_comparable(value, as_text=as_text) for value in node]
    if isinstance(node, ShardedTensor):
        return [shard.tensor for shard in node.local_shards()]
    return node


def _joined(filled: Any, beside: Any) -> Any:
    """An entry, and what torch put beside it: lists that it makes have None where nothing was read."""
    if isinstance(filled, dict) and isinstance(beside, dict):
        return filled | {key: _joined(filled.get(key), value) for key, value in beside.items()}
    if isinstance(filled, list) and isinstance(beside, list):
        return [_joined(*pair) for pair in itertools.zip_longest(filled, beside)]
    return filled if beside is None else beside
