"""Private names of torch that this package uses, with the versions that have them."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # 2.8, 2.11, 2.15
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,  # 2.8, 2.11, 2.15
)
from torch.distributed.checkpoint import (
    _sharded_tensor_utils,  # 2.8, 2.11, 2.15
    _version,  # 2.8, 2.11, 2.15
    planner_helpers,
    state_dict,
    state_dict_loader,
    utils,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # 2.8, 2.11, 2.15
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.distributed_c10d import _get_default_group, _world  # 2.8, 2.11, 2.15
from torch.distributed.remote_device import _remote_device  # 2.8, 2.11, 2.15
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # 2.8, 2.11, 2.15
from torch.distributed.tensor.placement_types import Placement, _StridedShard  # 2.8, 2.11, 2.15
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.8, 2.11, 2.15
from torch.utils.serialization import config

#: Classes of tensors without operations of their own.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

# Functions of torch as they are (2.8, 2.11, 2.15).
#: ``dcp.load_state_dict`` without its warning, 2.8, 2.11, 2.15.
load_state_dict = state_dict_loader._load_state_dict
chunk_list = planner_helpers._create_chunk_list
find_shard = utils.find_tensor_shard
flatten_sharded_tensors = _sharded_tensor_utils._flatten_sharded_tensors


def loads_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's own code alone loads the state of an optimizer."""
    own = torch.optim.Optimizer.load_state_dict
    # An optimizer around another one may lack the attributes of its base class.
    return (
        type(optimizer).load_state_dict is own
        and not optimizer._optimizer_load_state_dict_pre_hooks
    )


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let the steps of an optimizer call none of its hooks."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if name in vars(optimizer):
            setattr(optimizer, name, {})


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that makes a tensor. Return the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Return true if a tensor wraps other tensors, which hold its values."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper subclass declares; none if it declares none."""
    if not is_wrapper_subclass(tensor):
        return []
    # 2.15 names the mesh of a DTensor, too.
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [inner for name in names if isinstance(inner := getattr(tensor, name), torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, on any device, while it lives."""
    return int(tensor.untyped_storage()._cdata)


#: Lower bound of addresses. A view of a freed storage has its offset as address.
_LOWEST = 1 << 32
#: Name of the process group for background saves.
_BACKGROUND = "dcp_rs.async_save"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return false for a freed storage, and for subclasses without memory of their own."""
    if tensor.numel() == 0 or (address := tensor.data_ptr()) >= _LOWEST:
        return True
    return address != 0 and tensor.untyped_storage().data_ptr() != 0


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Return true if a process group sends host memory by gloo, unwrapped."""
    group, cpu = group or _get_default_group(), torch.device("cpu")
    return cpu in group._device_types and isinstance(
        group._get_backend(cpu), getattr(dist, "ProcessGroupGloo", ())
    )


def is_known(group: dist.ProcessGroup) -> bool:
    """Return true if a process group was made by torch.distributed, and not destroyed since."""
    return group in _world.pg_map


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a process group."""
    group = group or _get_default_group()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def background_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks for background saves. Every rank calls it.

    It is created once for a default group. torch removes it with the default group.
    """
    for group in _world.pg_map:
        if group.group_desc == _BACKGROUND:
            return group
    made = dist.new_group(backend="gloo", timeout=timeout_of(None), group_desc=_BACKGROUND)
    assert isinstance(made, dist.ProcessGroup)  # noqa: S101  # this process is one of the ranks
    return made


def require_cpu_backend(group: dist.ProcessGroup | None) -> None:
    """Raise a ``ValueError`` if a group cannot send host memory."""
    if torch.device("cpu") not in group_devices(group):
        raise ValueError(
            "a save in the background needs a process group with a CPU backend, "
            "as in init_process_group('cpu:gloo,cuda:nccl')"
        )


def forget_plans(planner: SavePlanner) -> None:
    """Remove the plans that a planner cached for the next save (2.8, 2.11, 2.15)."""
    if getattr(planner, "_enable_plan_caching", False):
        names = ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata")
        for name in names:
            cache: dict[str, Any] = getattr(SavePlanner, f"_cached_{name}", {})
            cache.pop(planner._cached_plans_key, None)  # type: ignore[attr-defined]


#: The attributes of torch's CheckpointableTensor, 2.15.
_PLACE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
#: Methods by which a tensor describes its own chunks. Megatron-FSDP sets them on plain tensors.
_CHUNKS = ("__create_chunk_list__", "__create_write_items__")


def has_place(tensor: torch.Tensor) -> bool:
    """Return true if attributes say where a tensor is in a larger one. torch asks for all four."""
    # The first check is fast, and most tensors fail it.
    return hasattr(tensor, _PLACE[0]) and all(hasattr(tensor, name) for name in _PLACE)


def describes_chunks(tensor: torch.Tensor) -> bool:
    """Return true if torch asks the tensor for its chunks."""
    return hasattr(tensor, _CHUNKS[0])


def is_shard(tensor: torch.Tensor) -> bool:
    """Return true if a tensor has a place in a larger one, or describes its own chunks."""
    return hasattr(tensor, _CHUNKS[0]) or has_place(tensor)


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself. ``to_local`` may return a view without its attributes."""
    return wait_tensor(tensor._local_tensor)


def place_in_whole(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that make a tensor, or a DTensor's local one, a shard of a larger."""
    own = getattr(local_of(tensor) if isinstance(tensor, DTensor) else tensor, "__dict__", {})
    return {name: own[name] for name in (*_PLACE, *_CHUNKS) if name in own}


def copy_place_in_whole(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Make ``other`` the same shard as ``tensor``, if that is one."""
    local = local_of(other) if isinstance(other, DTensor) else other
    for name, value in place_in_whole(tensor).items():
        setattr(local, name, value)


def spec_of(tensor: DTensor) -> Any:
    """Return the mesh, placements, shape and dtype of a DTensor."""
    return tensor._spec


def dtensor_of(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> DTensor:
    """Return a DTensor over a local tensor, on any device."""
    return DTensor(local, spec, requires_grad=requires_grad)


def flatten_as_2_3(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flatten a state dict as torch before 2.4: containers without tensors stay whole."""
    _version._derived_version = "2_3"
    try:
        flat, paths = flatten_state_dict(state_dict)
    finally:
        _version._derived_version = None
    return flat, paths


def dtensor_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Return the offsets of this rank's shard in the whole tensor."""
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets)


def is_strided_shard(placement: Placement) -> bool:
    """Return true if a placement may interleave ranks (FSDP2 over TP)."""
    return isinstance(placement, _StridedShard)


def empty_host_cache() -> None:
    """Free pinned memory that is not used."""
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if release is not None:  # 2.15 has the first, 2.8 and 2.11 the second
        release()


def with_dim(placement: Placement, dim: int) -> Placement:
    """Return the same placement for another dimension."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return type(placement)(dim)  # type: ignore[call-arg]  # Shard


def group_devices(group: dist.ProcessGroup | None) -> list[torch.device]:
    """Return the types of devices whose memory a process group can send."""
    return list((group or _get_default_group())._device_types)


def sendable_types(group: dist.ProcessGroup | None) -> list[str]:
    """Return the types of devices whose memory a process group sends itself.

    gloo lists ``cuda``, and sends it through host memory of its own.
    """
    group = group or _get_default_group()
    return [
        device.type
        for device in group._device_types
        if device.type == "cpu" or group._get_backend(device).name() != "gloo"
    ]


def bound_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return the device that ``init_process_group(device_id=)`` gave a process group."""
    device: torch.device | None = getattr(group or _get_default_group(), "bound_device_id", None)
    return device


def device_of(group: dist.ProcessGroup | None, device_type: str) -> torch.device:
    """Return the device of some type that this rank uses for a process group."""
    bound = bound_device(group)
    if bound is not None and bound.type == device_type:
        return bound
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def default_device(device_type: str | None) -> torch.device:
    """Return the device for new memory.

    Args:
        device_type: the type of the device; None for that of the process group, as in DCP.
    """
    if not dist.is_initialized():
        return torch.device(device_type or "cpu")
    types = [device.type for device in group_devices(None)]
    return device_of(None, device_type or ("cpu" if "cpu" in types else types[0]))


def at_device(group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """Return a context whose current device is that of the group, for collectives of objects.

    torch sends objects by the current device, which in a new thread is device 0.
    """
    bound = bound_device(group)
    if bound is None or bound.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(bound.type).device(bound)
    return context


def empty_like(tensor: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor of the same shape and sharding."""
    if isinstance(tensor, ShardedTensor):
        return _empty_sharded(tensor, dtype=dtype, device=device)
    if not isinstance(tensor, DTensor):
        if type(tensor) in PLAIN_TYPES and tensor.is_contiguous():
            made = torch.empty(
                tensor.shape, dtype=dtype, device=device
            )  # the other is slow on meta
        else:
            made = torch.empty_like(tensor, dtype=dtype, device=device, requires_grad=False)
        copy_place_in_whole(tensor, made)
        return made
    like = tensor.to_local()
    on_meta = DTensor.from_local(
        torch.empty_like(like, dtype=dtype, device="meta"),
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    # `from_local` would move the memory to the device of the mesh. FSDP can offload it to the host.
    local = torch.empty_like(like, dtype=dtype, device=device)
    made = dtensor_of(local, spec_of(on_meta), requires_grad=False)
    copy_place_in_whole(tensor, made)
    return made


def _empty_sharded(
    tensor: ShardedTensor, *, dtype: torch.dtype, device: torch.device
) -> ShardedTensor:
    made = {
        tuple(s.metadata.shard_offsets): torch.empty_like(
            s.tensor, dtype=dtype, device=device, requires_grad=False
        )
        for s in tensor.local_shards()
    }
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    moved, shards = False, dict[tuple[int, ...], Shard]()
    for shard in metadata.shards_metadata:
        part, place = made.get(tuple(shard.shard_offsets)), shard.placement
        if place is not None:
            to, at = (device if part is None else part.device), place.device()
            # The devices of other ranks have their own numbers.
            if at.type != to.type or (part is not None and at != to):
                shard.placement = _remote_device(f"rank:{place.rank()}/{to}")
                moved = True
        if part is not None:
            shards[tuple(shard.shard_offsets)] = Shard(part, shard)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [shards[offsets] for offsets in made],  # in the order of the caller's tensor
        metadata,
        process_group=tensor._process_group,
        sharding_spec=None if moved else tensor.sharding_spec(),
    )


def fqns(model: torch.nn.Module, name: str, *, skip_compiler_prefix: bool = True) -> list[str]:
    """Return the names of a parameter without wrappers such as DDP, FSDP and ``torch.compile``.

    A flat parameter of FSDP1 has several.
    """
    found = state_dict._get_fqns(model, name, skip_compiler_prefix=skip_compiler_prefix)
    return sorted(fqn.replace(_CHECKPOINT_PREFIX, "") for fqn in found)  # flat ones keep it


def without_compiler(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` wraps (2.8, 2.11, 2.15), or the module itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def module_version(module: torch.nn.Module) -> int | None:
    """Return the version of a module's state, which its class says."""
    return module._version


def module_versions(state: Any) -> Mapping[str, Any] | None:
    """Return what ``Module.state_dict()`` notes of its modules, by name (2.8, 2.11, 2.15)."""
    found = getattr(state, "_metadata", None)
    return found if isinstance(found, Mapping) else None


def set_module_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Tell ``Module.load_state_dict`` the versions of modules, by name (2.8, 2.11, 2.15)."""
    state._metadata = versions  # type: ignore[attr-defined]  # as Module.state_dict() does


def without_checksums() -> AbstractContextManager[None]:
    """Return a context in which ``torch.save`` leaves out the CRC-32 of its records."""
    context: AbstractContextManager[None] = config.patch(  # type: ignore[attr-defined]
        "save.compute_crc32", False
    )
    return context


# --- names of torch's own storage ---------------------------------------------------------------


def modules_that_name(stock: type) -> list[Any]:
    """Return modules of torch's DCP that refer to a class by its name.

    Modules that derive classes from it are left out.
    """
    # Imported now, it is found; later, it would import the class that is there then.
    from torch.distributed.checkpoint import format_utils  # noqa: F401

    found = []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("torch.distributed.checkpoint"):
            continue
        own = getattr(module, "__dict__", {})  # None prevents an import
        if own.get(stock.__name__) is not stock:
            continue
        classes = [cls for cls in own.values() if isinstance(cls, type) and cls is not stock]
        if not any(cls.__module__ == name and issubclass(cls, stock) for cls in classes):
            found.append(module)
    return found


def async_executors() -> list[Any]:
    """Return the classes whose ``execute_save`` runs an ``async_save``."""
    from torch.distributed.checkpoint._async_process_executor import (
        _ProcessBasedAsyncCheckpointExecutor,
    )
    from torch.distributed.checkpoint._async_thread_executor import (
        _ThreadBasedAsyncCheckpointExecutor,
    )

    return [_ProcessBasedAsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor]


def storage_writer_for(checkpoint_id: Any) -> Any:
    """Return the writer that torch chooses for a checkpoint id."""
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return _storage_setup(None, checkpoint_id, reader=False)
