"""Load a quantized Hugging Face folder by torchtitan's adapters on 2 ranks, and compare readers.

`torchtitan_quantized_run.py MODEL FOLDER` loads with torch's reader and with `RsReader`.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.models.deepseek_v3 import deepseekv3_configs
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

import dcp_rs

State = dict[str, torch.Tensor]


def deepseek() -> tuple[State, Callable[[], Any]]:
    """Return the state dict of torchtitan's smallest DeepSeek-V3 on `meta`, and its adapter."""
    config = deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    config.layers = config.layers[:2]
    with torch.device("meta"):
        state = config.build().state_dict()
    return state, lambda: DeepSeekV3StateDictAdapter(config, None)


def gpt_oss() -> tuple[State, Callable[[], Any]]:
    """Return the same of a gpt-oss.

    The adapter of torchtitan 0.3.0 skips the experts of its own model, which have other names than
    its table. They get the names of the table here.
    """
    config = gptoss_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 96
    with torch.device("meta"):
        state = config.build().state_dict()
    renamed = {name: name.removesuffix("_EGD").removesuffix("_EDF") for name in state}
    renamed = {name: new.removesuffix("_EG").removesuffix("_ED") for name, new in renamed.items()}
    return {
        renamed[name]: tensor for name, tensor in state.items()
    }, lambda: GptOssStateDictAdapter(config, None)


MODELS = {"deepseek": deepseek, "gpt_oss": gpt_oss}


class WholeReader(QuantizedHuggingFaceStorageReader):
    """Torch's reader with one bug corrected.

    Of an MXFP4 tensor it decodes the size and not the chunk, so that it fills 1/32 of the tensor.
    """

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            if name.endswith("_blocks"):
                begin = torch.Size([0] * len(entry.size))
                where = metadata.storage_data.pop(MetadataIndex(name, entry.chunks[0].offsets))
                metadata.storage_data[MetadataIndex(name, begin)] = where
                entry.chunks = [ChunkStorageMetadata(begin, entry.size)]
        return metadata


def sharded(state: State, mesh: DeviceMesh, dim: int, dtype: torch.dtype) -> State:
    """Return the state with its experts, and all other matrices, sharded along a dimension."""
    made: State = {}
    for name, tensor in state.items():
        full = torch.full(tensor.shape, torch.nan, dtype=dtype)
        cut = dim if "inner_experts" in name else max(0, dim - 1)
        made[name] = distribute_tensor(full, mesh, [Shard(cut)]) if tensor.dim() > cut + 1 else full
    return made


def local(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in state.items():
        yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(ours: State, theirs: State) -> None:
    """Raise if a name, a shape, a dtype or a bit differs."""
    assert list(ours) == list(theirs)
    for (name, mine), (_, other) in zip(local(ours), local(theirs), strict=True):
        assert mine.dtype == other.dtype, name
        assert mine.shape == other.shape, name
        assert not other.isnan().any(), name
        assert torch.equal(mine, other), name


def main(model: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    state, make_adapter = MODELS[model]()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    # torchtitan decodes to float32; bfloat16 parameters get the same bits without that step.
    for dtype, dequantize in ((torch.float32, torch.float32), (torch.bfloat16, True)):
        for dim in (0, 1, 2):
            results = []
            for is_ours in (False, True):
                adapter = make_adapter()
                hf_state_dict = adapter.to_hf(sharded(state, mesh, dim, dtype))
                reader = adapter.get_hf_storage_reader(str(folder), from_quantized=True)
                assert type(reader) is QuantizedHuggingFaceStorageReader
                assert reader.target_dtype == torch.float32
                reader.__class__ = WholeReader
                if is_ours:
                    reader = dcp_rs.RsReader(str(folder), dequantize=dequantize)
                dcp.load(hf_state_dict, storage_reader=reader)
                results.append((hf_state_dict, adapter.from_hf(hf_state_dict)))
            (theirs, whole), (ours, mine) = results
            compare(ours, theirs)
            compare(mine, whole)
            print(f"{model}, {dtype}, dim {dim}: {len(ours)} tensors, the same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
