"""Builds the compat corpus of format version 1: `PYTHONPATH=tests python -m compat.build_v1 OUTPUT`.

A small checkpoint of each kind of save. Its output is committed in `v1/` and never built anew:
later releases have to read what this release wrote. Beside each stands `<kind>.json`: what was
saved, written down from the state dict and not from the checkpoint.
"""

import json
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from compat import everything
from compat.everything import tensor

RANKS = 2
#: Kinds of others, with an index over them.
ADOPTED = ("stock", "views", "hf")


def describe(node: Any) -> Any:
    """A state dict as JSON, with the kinds of its containers, the types and the order of its keys, and every bit of its tensors."""
    if isinstance(node, torch.Tensor):
        raw = node.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return {
            "tensor": str(node.dtype).removeprefix("torch."),
            "shape": list(node.shape),
            "hex": bytes(raw.tolist()).hex(),
        }
    if isinstance(node, dict):
        factory = getattr(node, "default_factory", None)
        kind = type(node).__name__ + (f"({factory.__name__})" if factory else "")
        return {
            "mapping": kind,
            "items": [[repr(key), describe(value)] for key, value in node.items()],
        }
    if isinstance(node, list) and any(isinstance(entry, dict | torch.Tensor) for entry in node):
        return {"list": [describe(entry) for entry in node]}
    return {"value": type(node).__name__, "repr": repr(node)}


def plain() -> dict[str, Any]:
    return {
        "model.w": tensor((3, 4), "float32", 1),
        "model.b": tensor((4,), "bfloat16", 2),
        "step": tensor((), "int64", 3),
    }


def nested() -> dict[str, Any]:
    return OrderedDict(
        zero={},
        state={
            0: {"step": tensor((), "float32", 4)},
            10: {},
            2: {"step": tensor((), "float32", 5)},
        },
        param_groups=[{"lr": 0.1, "params": [0, 10, 2]}],
        keys={True: 1, None: 2, 1.5: 3, (1, "a"): 4, "text": 5},
        lists=[{}, tensor((2,), "uint8", 6), [{"x": tensor((1,), "int8", 7)}]],
        kinds=OrderedDict(b=Counter({30: 1, 5: 2}), a=defaultdict(list, {7: "x"})),
    )


def values() -> dict[str, Any]:
    return {
        "none": None,
        "tuple": (1, "a"),
        "list": [1, 2.5],
        "bytes": b"\0\xff",
        "text": "ä",
        "flag": True,
        "size": torch.Size([2, 3]),
    }


def sharded() -> dict[str, Any]:
    return {
        "rows": tensor((5, 3), "float32", 8),
        "columns": tensor((4, 3), "int16", 9),
        "common": tensor((2,), "float64", 10),
    }


def cast() -> dict[str, Any]:
    """What is saved as bfloat16: of float32, numbers that it holds."""
    return {
        "w": torch.arange(-4.0, 4.0),
        "n": tensor((3,), "int32", 11),
        "half": torch.arange(3.0, dtype=torch.float16),
    }


def rank_local(rank: int) -> dict[str, Any]:
    return {"own": tensor((3,), "float32", 20 + rank), "rank": rank}


def stock() -> dict[str, Any]:
    return {"model": {"w": tensor((2, 3), "float32", 12)}, "epoch": 3, "tuple": (1, 2)}


def views() -> dict[str, Any]:
    """What torch stores as views, and an index takes as they are: strides, also of 0, and signs."""
    numbers = tensor((3, 4), "float32", 15)
    return {
        "columns": numbers[:, :1].expand(3, 4),
        "conj": torch.complex(torch.arange(3.0), -torch.ones(3)).conj(),
        "rows": numbers[:1].expand(3, 4),
        "transposed": numbers.t(),
    }


def hf() -> dict[str, Any]:
    return {"a.weight": tensor((2, 3), "bfloat16", 13), "b.weight": tensor((5,), "float16", 14)}


def reused() -> dict[str, Any]:
    """Saved with a parent that holds all but the step."""
    return {
        "frozen": tensor((20, 30), "bfloat16", 16),
        "value": ("a run", 1),
        "step": tensor((), "int64", 17),
    }


def expected(kind: str) -> Any:
    """What comes back, where it can be told by a function."""
    if kind == "cast":
        return {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in cast().items()
        }
    kinds = {
        "plain": plain,
        "nested": nested,
        "values": values,
        "sharded": sharded,
        "stock": stock,
        "views": views,
        "hf": hf,
        "reused": reused,
    }
    return kinds[kind]()


def save_on_ranks(rank: int, output: str, store: str) -> None:
    """The parts of one rank."""
    import dcp_rs

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    everything.save(rank, f"{output}/everything")
    mesh = init_device_mesh("cpu", (RANKS,))
    state = sharded()
    for name, dim in (("rows", 0), ("columns", 1)):
        state[name] = distribute_tensor(state[name], mesh, [Shard(dim)], src_data_rank=None)
    dcp_rs.save(state, f"{output}/sharded")
    dcp.save(
        rank_local(rank),
        storage_writer=dcp_rs.RsWriter(f"{output}/rank_local"),
        use_collectives=False,
    )
    dist.destroy_process_group()


def build(output: Path) -> None:
    """Writes all kinds."""
    from safetensors.torch import save_file

    import dcp_rs

    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save_on_ranks, args=(str(output), str(Path(folder) / "store")), nprocs=RANKS)
    dcp_rs.save(plain(), output / "plain", no_dist=True)
    dcp_rs.save(nested(), output / "nested", no_dist=True)
    dcp_rs.save(values(), output / "values", no_dist=True)
    dcp_rs.save(cast(), output / "cast", no_dist=True, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as parent:
        dcp_rs.save(reused() | {"step": tensor((), "int64", 18)}, parent, no_dist=True)
        dcp_rs.save(reused(), output / "reused", no_dist=True, parent=parent, reuse="frozen")
    for kind in ("stock", "views"):
        dcp.save(expected(kind), checkpoint_id=output / kind, no_dist=True)
        dcp_rs.index(output / kind)
    (output / "hf").mkdir()
    save_file(hf(), output / "hf" / "model.safetensors")
    dcp_rs.index(output / "hf", digests=True)
    for lock in output.rglob(".dcprs.lock"):
        lock.unlink()
    states = {
        kind: expected(kind)
        for kind in ("plain", "nested", "values", "cast", "sharded", "reused", *ADOPTED)
    }
    for kind, state in states.items():
        about = {"state": describe(state)}
        if (
            kind in ADOPTED
        ):  # an index over data of others goes by the time of its files, which git does not keep
            about["mtimes"] = {
                file.name: file.stat().st_mtime_ns for file in sorted((output / kind).iterdir())
            }
        write(output / f"{kind}.json", about)
    write(
        output / "rank_local.json",
        {"states": [describe(rank_local(rank)) for rank in range(RANKS)]},
    )


def write(path: Path, about: dict[str, Any]) -> None:
    path.write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} is there already; a corpus is not built anew")
    build(target)
