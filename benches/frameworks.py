"""Saves and loads through frameworks, by what they have and by dcp-rs, in turn: `PYTHONPATH=python .venv-NAME/bin/python benches/frameworks.py NAME`.

NAME is lightning or merge (one process, in .venv-lightning and .venv-accelerate), accelerate or
torchtitan (2 ranks, by torchrun). A state of 605 MB or more: weights and the two moments of AdamW.
Warm. Prints medians of seconds, bytes on disk, and the ratio theirs / ours. What was loaded is
compared.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs

ROUNDS = 5
WIDTH, LAYERS = 2048, 12


def training_state() -> dict:
    weights = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(LAYERS)}
    moments = {
        i: {"exp_avg": torch.randn(WIDTH, WIDTH), "exp_avg_sq": torch.rand(WIDTH, WIDTH)}
        for i in range(LAYERS)
    }
    group = {"lr": 0.1, "params": list(range(LAYERS))}
    return {
        "epoch": 1,
        "state_dict": weights,
        "optimizer_states": [{"state": moments, "param_groups": [group]}],
    }


Timed = Callable[[str, Callable[[], object]], object]


def timer(times: dict[str, list[float]]) -> Timed:
    def timed(name: str, call: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    return timed


def bytes_at(path: Path) -> int:
    return (
        path.stat().st_size
        if path.is_file()
        else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    )


def report(
    times: dict[str, list[float]],
    theirs: str,
    ours: list[str],
    what: tuple[str, ...] = ("save", "load"),
) -> None:
    for action in what:
        old = times[f"{action}, {theirs}"]
        for name in ours:
            new = times[f"{action}, {name}"]
            ratios = sorted(t / o for t, o in zip(old, new, strict=True))
            print(
                f"{action}: {theirs} {statistics.median(old):.2f} s, {name} {statistics.median(new):.2f} s, "
                f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                flush=True,
            )


def lightning(folder: Path) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from dcp_rs.integrations.lightning import DcpRsCheckpointIO

    state = training_state()
    plugins = {
        "lightning": TorchCheckpointIO(),
        "dcp-rs": DcpRsCheckpointIO(),
        "dcp-rs, no fsync": DcpRsCheckpointIO(fsync=False),
    }
    times: dict[str, list[float]] = {}
    timed = timer(times)
    for _ in range(ROUNDS):
        for name, plugin in plugins.items():
            path = folder / f"{name}.ckpt"
            timed(
                f"save, {name}",
                lambda plugin=plugin, path=path: plugin.save_checkpoint(state, path),
            )
            loaded = timed(
                f"load, {name}", lambda plugin=plugin, path=path: plugin.load_checkpoint(path)
            )
            for key, tensor in state["state_dict"].items():
                assert torch.equal(loaded["state_dict"][key], tensor)
            print(f"{name}: {bytes_at(path):,} bytes")
            plugin.remove_checkpoint(path)
    report(times, "lightning", ["dcp-rs", "dcp-rs, no fsync"])


def merge(folder: Path) -> None:
    from accelerate import PartialState
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    from dcp_rs.integrations import accelerate as ours

    PartialState(cpu=True)
    state = {
        "model": training_state()["state_dict"]
        | {f"more.{i}": torch.randn(WIDTH, WIDTH) for i in range(2 * LAYERS)}
    }
    dcp.save(state, checkpoint_id=folder / "ckpt", no_dist=True)
    times: dict[str, list[float]] = {}
    timed = timer(times)
    for _ in range(ROUNDS):
        for name, call in (("accelerate", merge_fsdp_weights), ("dcp-rs", ours.merge_fsdp_weights)):
            timed(
                f"merge, {name}", lambda call=call, name=name: call(folder / "ckpt", folder / name)
            )
            merged = load_file(folder / name / "model.safetensors")
            assert all(torch.equal(merged[key], tensor) for key, tensor in state["model"].items())
            print(f"{name}: {bytes_at(folder / name):,} bytes")
            shutil.rmtree(folder / name)
    report(times, "accelerate", ["dcp-rs"], ("merge",))


def accelerate(folder: Path) -> None:
    """``save_state`` and ``load_state`` under FSDP2. That ranks of CPUs have one is made up, as in tests/frameworks/accelerate_run.py."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    want = [parameter.to_local().clone() for parameter in model.parameters()]
    times: dict[str, list[float]] = {}
    timed = timer(times)
    for _ in range(ROUNDS):
        for name, context in (("accelerate", nullcontext), ("dcp-rs", dcp_rs.installed)):
            path = folder / name
            with context():
                timed(f"save, {name}", lambda path=path: accelerator.save_state(str(path)))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                timed(f"load, {name}", lambda path=path: accelerator.load_state(str(path)))
            assert all(
                torch.equal(p.to_local(), w) for p, w in zip(model.parameters(), want, strict=True)
            )
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                print(f"{name}: {bytes_at(path):,} bytes")
                shutil.rmtree(path)
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        report(times, "accelerate", ["dcp-rs"])


class Part:
    """An optimizer, a loader: what a manager of torchtitan knows of them."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = dict(state)


def torchtitan(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager

    from dcp_rs.integrations.torchtitan import DcpRsCheckpointManager

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    fully_shard(model, mesh=mesh)
    moments = {
        f"{kind}.{name}": torch.zeros_like(p)
        for name, p in model.named_parameters()
        for kind in ("avg", "sq")
    }
    managers = {}
    for name, cls in (("torchtitan", CheckpointManager), ("dcp-rs", DcpRsCheckpointManager)):
        config = cls.Config(
            enable=True, folder=name, interval=1, keep_latest_k=0, last_save_model_only=False
        )
        managers[name] = config.build(
            dataloader=Part(at=1),
            model_parts=[model],
            optimizers=Part(**moments),
            lr_schedulers=Part(last=1),
            states={"train_state": Part(step=1)},
            sd_adapter=None,
            base_folder=str(folder),
        )
    want = [parameter.to_local().clone() for parameter in model.parameters()]
    times: dict[str, list[float]] = {}
    timed = timer(times)
    for step in range(1, ROUNDS + 1):
        for name, manager in managers.items():
            timed(f"save, {name}", lambda manager=manager, step=step: manager.save(step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            timed(f"load, {name}", lambda manager=manager, step=step: manager.load(step))
            assert all(
                torch.equal(p.to_local(), w) for p, w in zip(model.parameters(), want, strict=True)
            )
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{name}: {bytes_at(folder / name / f'step-{step}'):,} bytes")
                shutil.rmtree(folder / name)
            dist.barrier()
    if dist.get_rank() == 0:
        report(times, "torchtitan", ["dcp-rs"])


def main(name: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    names = [tempfile.mkdtemp(dir=Path(__file__).parent) if rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    try:
        {
            "lightning": lightning,
            "merge": merge,
            "accelerate": accelerate,
            "torchtitan": torchtitan,
        }[name](Path(names[0]))
    finally:
        if rank == 0:
            shutil.rmtree(names[0], ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
