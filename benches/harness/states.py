"""State dicts with contents that can be checked bit for bit without a second copy of them."""

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness.context import Sizes

Shapes = Mapping[str, tuple[int, ...]]

_SLACK = 16 << 20
_STEP = 8 * 4099  # tensors differ at every position


def model_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """A decoder with grouped-query attention: 9 tensors a layer, and an embedding."""
    hidden, small, wide = sizes.hidden, sizes.hidden // 4, sizes.hidden * 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab, hidden)}
    for layer in range(sizes.layers):
        parts = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (small, hidden),
            "self_attn.v_proj": (small, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def small_shapes(count: int) -> dict[str, tuple[int, ...]]:
    """Tensors of 4 KiB in float32, as mixtures of many small experts have them."""
    return {f"layers.{i // 100}.experts.{i % 100}.weight": (64, 16) for i in range(count)}


def square_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Matrices to be cut by rows and by columns."""
    return {
        f"layers.{i}.weight": (sizes.reshard_dim, sizes.reshard_dim) for i in range(sizes.reshard)
    }


class Pattern:
    """The contents of a state dict: tensor i is a slice of one random block, at a place of its own."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = dict(shapes)
        self.dtype = dtype
        self.nbytes = sum(map(self._nbytes, self.shapes))
        largest = max(map(self._nbytes, self.shapes))
        generator = torch.Generator().manual_seed(20_26)
        words = (largest + _SLACK) // 8 + 1
        block = torch.randint(-(2**62), 2**62, (words,), dtype=torch.int64, generator=generator)
        self._block = block.view(torch.uint8)
        self._place = {name: i * _STEP % _SLACK for i, name in enumerate(self.shapes)}

    def _nbytes(self, name: str) -> int:
        return prod(self.shapes[name]) * self.dtype.itemsize

    def bytes_of(self, name: str) -> torch.Tensor:
        """What tensor `name` holds, as bytes; a view, not to be written to."""
        place = self._place[name]
        return self._block[place : place + self._nbytes(name)]

    def view(self, name: str) -> torch.Tensor:
        """The same as a tensor."""
        return self.bytes_of(name).view(self.dtype).view(self.shapes[name])

    def state(self) -> dict[str, torch.Tensor]:
        """A state dict with memory of its own."""
        return {name: self.view(name).clone() for name in self.shapes}

    def blank(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """A state dict to load into, of all names or these, its memory touched."""
        state = {
            n: torch.empty(self.shapes[n], dtype=self.dtype)
            for n in (self.shapes if names is None else names)
        }
        scramble(state.values())
        return state

    def check(self, state: Mapping[str, torch.Tensor], names: Iterable[str] | None = None) -> None:
        """Raises unless every bit is right, of all names or these."""
        for name in self.shapes if names is None else names:
            stored = state[name].detach().contiguous().view(torch.uint8).view(-1)
            assert torch.equal(stored, self.bytes_of(name)), (
                f"{name} was not loaded as it was saved"
            )


def shard(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The part of this rank."""
    return torch.chunk(tensor, mesh.size(), dim=dim)[mesh.get_local_rank()]


def shards(
    pattern: Pattern, dim: int, mesh: DeviceMesh
) -> tuple[dict[str, DTensor], dict[str, torch.Tensor]]:
    """Shards as DTensors to load into, and the memory behind them."""
    memory = {
        name: torch.zeros_like(
            shard(pattern.view(name), dim, mesh), memory_format=torch.contiguous_format
        )
        for name in pattern.shapes
    }
    state = {
        name: DTensor.from_local(
            local,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(pattern.shapes[name]),
            stride=pattern.view(name).stride(),
        )
        for name, local in memory.items()
    }
    return state, memory


def check_shards(
    pattern: Pattern, dim: int, mesh: DeviceMesh, memory: Mapping[str, torch.Tensor]
) -> None:
    """Raises unless every bit is right."""
    for name, local in memory.items():
        expected = shard(pattern.view(name), dim, mesh).contiguous()
        assert torch.equal(local.view(torch.uint8), expected.view(torch.uint8)), (
            f"{name} was not loaded as it was saved"
        )


def scramble(tensors: Iterable[torch.Tensor]) -> None:
    """Fills tensors with what no checkpoint holds, so that only a load makes them right."""
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.ndim:
            tensor.view(torch.uint8).fill_(0x5A)
        else:
            tensor.fill_(-1)


def size_of(nbytes: int) -> str:
    """A number of bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
