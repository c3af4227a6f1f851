"""Saves and loads of integrations beside those that the framework has, in turn: `PYTHONPATH=python .venv-lightning/bin/python benches/frameworks.py lightning`.

One process, a state of 605 MB (weights and the two moments of AdamW), warm. Prints medians of seconds, and the ratio theirs / ours.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROUNDS = 5
WIDTH, LAYERS = 2048, 12


def training_state() -> dict:
    weights = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(LAYERS)}
    moments = {i: {"exp_avg": torch.randn(WIDTH, WIDTH), "exp_avg_sq": torch.rand(WIDTH, WIDTH)} for i in range(LAYERS)}
    group = {"lr": 0.1, "params": list(range(LAYERS))}
    return {"epoch": 1, "state_dict": weights, "optimizer_states": [{"state": moments, "param_groups": [group]}]}


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

    def timed(name: str, call: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for _ in range(ROUNDS):
        for name, plugin in plugins.items():
            path = folder / f"{name}.ckpt"
            timed(f"save, {name}", lambda plugin=plugin, path=path: plugin.save_checkpoint(state, path))
            loaded = timed(f"load, {name}", lambda plugin=plugin, path=path: plugin.load_checkpoint(path))
            for key, tensor in state["state_dict"].items():
                assert torch.equal(loaded["state_dict"][key], tensor)
            files = [path] if path.is_file() else list(path.iterdir())
            print(f"{name}: {sum(file.stat().st_size for file in files):,} bytes")
            plugin.remove_checkpoint(path)
    for what in ("save", "load"):
        theirs = times[f"{what}, lightning"]
        for name in ("dcp-rs", "dcp-rs, no fsync"):
            ours = times[f"{what}, {name}"]
            ratios = sorted(t / o for t, o in zip(theirs, ours, strict=True))
            print(
                f"{what}: lightning {statistics.median(theirs):.2f} s, {name} {statistics.median(ours):.2f} s, "
                f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        {"lightning": lightning}[sys.argv[1]](Path(folder))
