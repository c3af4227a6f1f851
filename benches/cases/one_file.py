"""`load_file` and `save_file` beside those of safetensors, and every byte that was loaded touched once."""

from collections.abc import Callable

import torch
from harness import page_cache
from harness.context import Context
from harness.pairs import Contender, Times, measure, nothing
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of
from safetensors.torch import load_file, save_file

import dcp_rs

LOAD, VIEW, THEIR_LOAD = (
    "dcp_rs.load_file",
    'dcp_rs.load_file(backend="mmap")',
    "safetensors load_file",
)
SAVE, DURABLE, THEIR_SAVE = (
    "dcp_rs.save_file, fsync=False",
    "dcp_rs.save_file",
    "safetensors save_file",
)


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "one_file"
    folder.mkdir(parents=True, exist_ok=True)
    single, written = folder / "model.safetensors", folder / "written.safetensors"
    state = pattern.state()
    save_file(state, single)
    page_cache.warm(folder)
    loaded: dict[str, torch.Tensor] = {}
    sums: dict[str, torch.Tensor] = {}

    def touch() -> None:
        sums.update((name, tensor.view(torch.int16).sum()) for name, tensor in loaded.items())

    def ours() -> None:
        loaded.update(dcp_rs.load_file(single))
        touch()

    def views() -> None:
        loaded.update(dcp_rs.load_file(single, backend="mmap"))
        touch()

    def theirs() -> None:
        loaded.update(load_file(single))
        touch()

    def check() -> None:
        pattern.check(loaded)
        loaded.clear()

    def check_written() -> None:
        loaded.update(load_file(written))
        check()

    def remove() -> None:
        written.unlink(missing_ok=True)

    def loads(before: Callable[[], None]) -> dict[str, Times]:
        ways = ((LOAD, ours), (VIEW, views), (THEIR_LOAD, theirs))
        contenders = [Contender(name, run, before, verify=check) for name, run in ways]
        return measure(contenders, **context.pairs)

    warm, cold = loads(nothing), loads(lambda: page_cache.drop(single))
    saves = {
        SAVE: lambda: dcp_rs.save_file(state, written, fsync=False),
        DURABLE: lambda: dcp_rs.save_file(state, written),
        THEIR_SAVE: lambda: save_file(state, written),
    }
    save_times = measure(
        [
            Contender(name, save, before=remove, verify=check_written)
            for name, save in saves.items()
        ],
        **context.pairs,
    )
    remove()
    case = f"one file, {size_of(pattern.nbytes)}"
    return [
        versus(f"{case}: load and touch, warm", warm, LOAD, THEIR_LOAD, reach=1),
        versus(f"{case}: view and touch, warm", warm, VIEW, THEIR_LOAD, reach=1),
        versus(f"{case}: load and touch, cold", cold, LOAD, THEIR_LOAD, reach=1),
        versus(f"{case}: view and touch, cold", cold, VIEW, THEIR_LOAD, reach=1),
        versus(f"{case}: save", save_times, SAVE, THEIR_SAVE, reach=1),
        versus(f"{case}: save, durable", save_times, DURABLE, THEIR_SAVE, reach=1),
    ]
