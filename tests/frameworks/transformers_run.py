"""Loads tiny models over two ranks: `torchrun transformers_run.py FOLDER`. The last rank prints a line of JSON for each."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import dcp_rs.integrations.transformers as ours
from dcp_rs.checkpoint import open as opened

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)),
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(**SIZES, num_local_experts=4),
    ),
    "qwen3-moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2, head_dim=8
        ),
    ),
}


def make(name):
    """The whole model, the same on every rank."""
    cls, config = MODELS[name]
    torch.manual_seed(0)
    return cls(config).eval()


class Counted(opened.TensorSlice):
    """Counts the bytes that are read."""

    nbytes = 0

    def __getitem__(self, key):
        values = super().__getitem__(key)
        Counted.nbytes += values.nbytes
        return values


def load(name, path, **how):
    """What one rank finds: bytes read and held, and whether weights and answers are those of the whole model."""
    whole = make(name)
    Counted.nbytes = 0
    model = ours.from_pretrained(type(whole), path, config=MODELS[name][1], **how)
    held, wrong = 0, []
    expected = whole.state_dict()
    for key, tensor in model.state_dict().items():
        is_sharded = isinstance(tensor, DTensor)
        held += (tensor.to_local() if is_sharded else tensor).nbytes
        if not torch.equal(tensor.full_tensor() if is_sharded else tensor, expected[key]):
            wrong.append(key)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        agree = torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-4)
    return {
        "whole": sum(tensor.nbytes for tensor in expected.values()),
        "held": held,
        "read": Counted.nbytes,
        "wrong": wrong,
        "agree": agree,
    }


def main(folder):
    opened.TensorSlice = Counted
    dist.init_process_group("gloo")
    ways = {
        "tp_plan": lambda: {"tp_plan": "auto"},
        "device_mesh": lambda: {"tp_plan": "auto", "device_mesh": init_device_mesh("cpu", (2,))},
        "distributed_config": lambda: {"distributed_config": DistributedConfig(tp_size=2)},
        "experts": lambda: {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)},
    }
    for name in MODELS:
        for way, how in ways.items():
            if (name, way) == ("llama", "experts"):
                continue
            for kind in ("training", "hf"):
                found = load(name, Path(folder, name, kind), **how())
                if dist.get_rank() == 1:
                    print(
                        json.dumps({"model": name, "way": way, "kind": kind, **found}), flush=True
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
