"""Other loaders, each in a virtual environment of its own, filling the same tensors from its own file or from safetensors files."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.driven import Driven, worker
from harness.loaders import OURS
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of

#: What to install for each loader of `workers/peer_worker.py`. safetensors' own pre-release
#: prefetches on CUDA only.
PACKAGES = {
    "safetensors": ["safetensors>=0.9.0rc1", "--prerelease=allow"],
    "fastsafetensors": ["fastsafetensors"],
    "runai": ["runai-model-streamer"],
    "flashpack": ["flashpack"],
    "tensorizer": ["tensorizer"],
}
NAMES = {"safetensors": "safetensors (pre-release) load_file", "runai": "Run:ai model streamer"}


def run(context: Context) -> list[Row]:
    if context.peers is None:
        return []
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "model"
    native = checkpoints.native(folder, pattern)
    checkpoints.hugging_face(folder, pattern)
    rows = []
    for loader in PACKAGES:  # one at a time: each holds a state of its own
        rows += _pair(context, loader, pattern, native)
    return rows


def _pair(context: Context, loader: str, pattern: Pattern, native: Path) -> list[Row]:
    name = NAMES.get(loader, loader)
    case = f"{len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    state = pattern.blank()
    with ExitStack() as stack:
        try:
            python = install(context, loader)
            peer = stack.enter_context(
                worker("peer_worker", loader, native.parent, context.size, python=python)
            )
            prepared = peer.ask("prepare")
        except (subprocess.CalledProcessError, RuntimeError) as error:
            reason = f"does not install or run here: {error}"
            return [Row(f"warm, {case}", OURS, name, note=reason, skipped=True)]
        name = f"{name} {prepared['version']}"
        files = [Path(file) for file in prepared["files"]]
        page_cache.sync(*files)
        rows = []
        for warmth, prepare in (("warm", page_cache.warm), ("cold", page_cache.drop)):
            ours = loaders.loads(
                OURS, loaders.ours, native, state, pattern, before=partial(prepare, native)
            )
            theirs = Contender(
                name,
                lambda: peer.seconds("load"),
                before=partial(_prepare, peer, prepare, files),
                verify=partial(peer.ask, "verify"),
            )
            times = measure([ours, theirs], **context.pairs)
            rows.append(versus(f"{warmth}, {case}", times, OURS, name))
    for file in files:
        if file.parent == native.parent:  # its own format
            file.unlink()
    return rows


def _prepare(peer: Driven, cache: Callable[..., None], files: list[Path]) -> None:
    peer.ask("scramble")
    cache(*files)


def install(context: Context, loader: str) -> str:
    """The interpreter of a virtual environment with the loader, and with the torch of this one."""
    assert context.peers is not None
    folder = context.peers / loader
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        uv = Path(sys.executable).with_name("uv")
        torch_version = torch.__version__.split("+")[0]
        make = [str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        subprocess.run(make, check=True)
        command = [str(uv), "pip", "install", "--quiet", "--python", str(python)]
        packages = [f"torch=={torch_version}", "numpy", *PACKAGES[loader]]
        subprocess.run([*command, *packages], check=True)
        done.touch()
    return str(python)
