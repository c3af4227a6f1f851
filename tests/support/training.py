"""Small models under every kind of parallelism, and steps of training that can be repeated bit for bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Uneven sizes, fewer rows than ranks somewhere, a frozen parameter, buffers, and tied weights if asked."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Block(8, 12), Block(8, 12)])
        self.head = nn.Linear(8, 13, bias=False)
        self.scale = nn.Parameter(torch.randn(3))  # with 4 ranks, one has none of it
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.randn(8))
        if tied:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x - self.mean) * self.scale.sum()


TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def square_mesh(names: tuple[str, str]) -> Any:
    """As square as the number of ranks allows: 2 x 2, 1 x 2, 1 x 1."""
    size = dist.get_world_size()
    rows = 2 if size == 4 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=names)


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    with quiet():
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, device_id=CPU, **options)
        return FullyShardedDataParallel(model, device_id=CPU, **options)


def fsdp2(module: nn.Module, mesh: Any) -> nn.Module:
    sharded = fully_shard(module, mesh=mesh)
    sharded.set_force_sum_reduction_for_comms(True)  # asked to average, Gloo of torch 2.8 sums
    return sharded


def parallelize(kind: str, seed: int, **options: Any) -> nn.Module:  # noqa: C901, PLR0912  # a table, as code
    """The model of a seed, wrapped or sharded as ``kind`` says."""
    torch.manual_seed(seed)
    model = Model(**options)
    size = dist.get_world_size() if dist.is_initialized() else 1
    match kind:
        case "plain":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp1":
            return fsdp1(model, use_orig_params=True)
        case "fsdp1_flat":
            # Flat parameters are trained or frozen as a whole.
            return fsdp1(model, use_orig_params=False, ignored_states=[model.frozen])
        case "fsdp1_hybrid":
            rows = 2 if size == 4 else 1
            mesh = init_device_mesh(
                "cpu", (rows, size // rows), mesh_dim_names=("replicate", "shard")
            )
            return fsdp1(
                model,
                use_orig_params=True,
                device_mesh=mesh,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            )
        case "fsdp2":
            mesh = init_device_mesh("cpu", (size,))
            for block in model.blocks:
                fsdp2(block, mesh)
            return fsdp2(model, mesh)
        case "hsdp":
            mesh = square_mesh(("replicate", "shard"))
            for block in model.blocks:
                fsdp2(block, mesh)
            return fsdp2(model, mesh)
        case "tp":
            mesh = init_device_mesh("cpu", (size,))
            for block in model.blocks:
                parallelize_module(block, mesh, TP_PLAN)
            return model
        case "fsdp2_tp":
            mesh = square_mesh(("dp", "tp"))
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], TP_PLAN)
                fsdp2(block, mesh["dp"])
            return fsdp2(model, mesh["dp"])
    raise ValueError(kind)


KINDS = ["ddp", "fsdp1", "fsdp1_flat", "fsdp1_hybrid", "fsdp2", "hsdp", "tp", "fsdp2_tp"]


class Holder:
    """An object that has a state, as a scheduler or a loader does."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps of a model of 4 inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], at: int) -> float:
    """One step on the batch number ``at``, the same on every rank, so that any number of ranks does the same training."""
    generator = torch.Generator().manual_seed(at)
    ids = torch.randint(0, 13, (6,), generator=generator)
    loss = nn.functional.cross_entropy(model(ids), ids.roll(1))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return float(loss.detach())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model, gathered, by FQN."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with quiet():
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: whole(value) for name, value in state.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of FSDP1, of DTensors and of states it deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
