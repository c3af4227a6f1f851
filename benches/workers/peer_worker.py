"""Another loader, in the virtual environment it was installed into: `peer_worker.py LOADER FOLDER SIZE`, then prepare, load, verify.

Imports nothing of dcp-rs. Every loader fills the same preallocated CPU tensors; what a loader has
no call for is copied.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from harness.context import SIZES
from harness.driven import Answer, serve
from harness.states import Pattern, model_shapes, scramble

LOADER, FOLDER = sys.argv[1], Path(sys.argv[2])
PATTERN = Pattern(model_shapes(SIZES[sys.argv[3]]), torch.bfloat16)
FILES = sorted(map(str, FOLDER.joinpath("hugging-face").glob("*.safetensors")))
STATE = PATTERN.blank()


def fill(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        STATE[name].copy_(tensor)


def safetensors() -> None:
    from safetensors.torch import load_file

    for file in FILES:
        fill(load_file(file).items())


def fastsafetensors() -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: FILES})
    buffers = loader.copy_files_to_device()
    fill((name, buffers.get_tensor(name)) for name in loader.get_keys())
    buffers.close()
    loader.close()


def runai() -> None:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(FILES)
        fill(streamer.get_tensors())


def flashpack() -> None:
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file  # type: ignore[import-not-found]

    storage, meta = read_flashpack_file(str(own_file()), device="cpu")
    fill(iterate_from_flash_tensor(storage, meta))


def tensorizer() -> None:
    from tensorizer import TensorDeserializer  # type: ignore[import-not-found]

    readers = len(os.sched_getaffinity(0))
    with TensorDeserializer(str(own_file()), device="cpu", num_readers=readers) as tensors:
        fill(tensors.items())


def own_file() -> Path:
    """The state in the loader's own format."""
    return FOLDER / f"peer.{LOADER}"


def prepare() -> Answer:
    """Writes that, where the loader has a format of its own."""
    if LOADER == "flashpack":
        from flashpack import pack_to_file  # type: ignore[import-not-found]

        pack_to_file(PATTERN.state(), str(own_file()), target_dtype=torch.bfloat16)
    elif LOADER == "tensorizer":
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(own_file()))
        serializer.write_state_dict(PATTERN.state())
        serializer.close()
    package = {"runai": "runai-model-streamer"}.get(LOADER, LOADER)
    own = [str(own_file())] if own_file().exists() else FILES
    return {"version": importlib.metadata.version(package), "files": own}


LOADERS: dict[str, Callable[[], None]] = {
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
    "flashpack": flashpack,
    "tensorizer": tensorizer,
}

if __name__ == "__main__":
    serve(
        {
            "prepare": prepare,
            "load": LOADERS[LOADER],
            "verify": lambda: PATTERN.check(STATE),
            "scramble": lambda: scramble(STATE.values()),
        }
    )
