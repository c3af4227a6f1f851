"""The folders of docs/how-to.md: a Hugging Face model, and a checkpoint that stock DCP saved from two ranks.

torchrun --nproc-per-node 2 examples/how_to_folders.py .
torchrun --nproc-per-node 2 examples/how_to_folders.py large 1024
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LAYERS = 2


def model(width: int) -> dict[str, torch.Tensor]:
    """The parameters of a small transformer, the same every time."""
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (8 * width, width)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.attention.wqkv.weight"] = (3 * width, width)
        shapes[f"layers.{layer}.attention.wo.weight"] = (width, width)
        shapes[f"layers.{layer}.feed_forward.w1.weight"] = (4 * width, width)
        shapes[f"layers.{layer}.feed_forward.w2.weight"] = (width, 4 * width)
        shapes[f"layers.{layer}.norm.weight"] = (width,)
    shapes["norm.weight"] = (width,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def training_state(width: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The same model in the midst of its training: sharded by rows, or (``w2`` and ``wo``) by columns, with the state of Adam."""
    parameters = {
        name: distribute_tensor(value, mesh, [Shard(1 if name.endswith(("wo.weight", "w2.weight")) else 0)])
        for name, value in model(width).items()
    }
    optimizer: dict[str, Any] = {}
    for name, value in parameters.items():
        optimizer[f"state.{name}.exp_avg"] = value * 0.1
        optimizer[f"state.{name}.exp_avg_sq"] = value * value
        optimizer[f"param_groups.{name}.lr"] = 3e-4
    return {"model": parameters, "optimizer": optimizer, "train_state": {"step": 100, "ntokens_seen": 409600}}


def main(folder: str, width: int = 8) -> None:
    """Writes ``hf_model`` and ``titan/step-100`` into a folder."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        hf = Path(folder) / "hf_model"
        hf.mkdir(parents=True)
        save_file({name: value.bfloat16() for name, value in model(width).items()}, hf / "model.safetensors")
        (hf / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    dist.barrier()
    dcp.save(training_state(width, mesh), checkpoint_id=f"{folder}/titan/step-100")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], *map(int, sys.argv[2:]))
    dist.destroy_process_group()
