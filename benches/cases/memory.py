"""How much anonymous memory a load needs beyond its destination, sampled from outside in a fresh process."""

from pathlib import Path

import torch
from harness import checkpoints, page_cache
from harness.context import Context
from harness.driven import worker
from harness.loaders import HUGGING_FACE, OURS, SAFETENSORS, STOCK
from harness.memory import extra_anonymous_bytes
from harness.rows import Row, figure
from harness.states import Pattern, model_shapes, size_of

ROUNDS = 3


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "model"
    native = checkpoints.native(folder, pattern)
    stock = checkpoints.stock(folder, pattern)
    hugging_face = checkpoints.hugging_face(folder, pattern)
    amount = size_of(pattern.nbytes)
    rows = []
    for warmth, name, path in (
        ("warm", OURS, native),
        ("cold", OURS, native),
        ("warm", STOCK, stock),
        ("warm", HUGGING_FACE, hugging_face),
        ("warm", SAFETENSORS, hugging_face),
    ):
        targets = (100.0, 64.0) if name == OURS else (None, None)
        case = f"{warmth}, extra anonymous memory while loading {amount}"
        try:
            extra = [
                _extra(context, warmth, name, path)
                for _ in range(min(ROUNDS, context.pairs["rounds"]))
            ]
        except RuntimeError as error:
            rows.append(Row(case, name, reach=targets[0], stretch=targets[1], error=str(error)))
            continue
        rows.append(
            figure(
                case,
                name,
                "MB",
                extra,
                reach=targets[0],
                stretch=targets[1],
                note="first load of a process",
            )
        )
    return rows


def _extra(context: Context, warmth: str, name: str, path: Path) -> float:
    """Megabytes, in a process that loads for the first time."""
    with worker("load_worker", path, context.size) as process:
        process.ask("prepare", name)
        if warmth == "cold":
            page_cache.drop(path)
        else:
            page_cache.warm(path)
        extra = extra_anonymous_bytes(process, "load") / 1e6
        process.ask("verify")
    return extra
