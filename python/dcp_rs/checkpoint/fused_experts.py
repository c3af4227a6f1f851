"""Views between single experts, as in Hugging Face's files, and the fused ones of transformers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_rs._url import StrPath
from dcp_rs.checkpoint.views import Concat, Split, Stack, Unstack, View
from dcp_rs.errors import UnsupportedError

#: The limit on a ``config.json``, that of the headers of safetensors.
_MOST_BYTES = 100_000_000
#: The module of the experts in files and in the model, and the names of the gate, up and down
#: projections in files (transformers' ``conversion_mapping.py``).
_QWEN = ("mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
_TYPES = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
        _QWEN,
    ),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), _QWEN),
    **dict.fromkeys(("mixtral", "minimax"), ("block_sparse_moe", "mlp", ("w1", "w3", "w2"))),
    "phimoe": ("mlp", "mlp", ("w1", "w3", "w2")),
    "lfm2_moe": ("feed_forward", "feed_forward", ("w1", "w3", "w2")),
    "jamba": ("feed_forward", "feed_forward", ("gate_proj", "up_proj", "down_proj")),
}
#: Models whose files have fused experts, too.
_FUSED = {"gpt_oss", "granitemoe", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}
#: The names of the number of experts in configurations.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def views_for(
    config: Mapping[str, Any] | StrPath | Any, *, fuse: bool = True, prefix: str = ""
) -> list[View]:
    """Return the views that fuse single experts in Hugging Face's files, as transformers 5 does.

    Args:
        config: a configuration of transformers, its dict, or a folder with a ``config.json``.
        fuse: ``False`` returns the inverse views, from fused experts to single ones.
        prefix: the prefix of the model's names in the checkpoint: ``"model."`` in a state dict of
            model and optimizer.

    Returns:
        Views for ``views=``; none for a model without experts, or with fused experts in its files.

    Raises:
        UnsupportedError: the model has experts, and its type is not known, or ``config.json`` is
            not that of a model.

    Example:
        ```python
        views = dcp_rs.views_for({"model_type": "qwen3_moe", "num_experts": 128})
        assert views[-1].into == "model.layers.{layer}.mlp.experts.down_proj"
        ```
    """
    if isinstance(config, str | os.PathLike):
        if not Path(config).is_dir():
            msg = f"config={os.fspath(config)!r}: no such folder; pass model.config, or its dict"
            raise FileNotFoundError(msg)
        config = read_config(Path(config) / "config.json")
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        msg = f"config is of type {type(config).__name__}: pass model.config, its dict, or a folder"
        raise TypeError(msg)
    known = config if isinstance(config, Mapping) else config.to_dict()
    model_type = known.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    if model_type not in _TYPES:
        inner = known.get("text_config")
        places = [known, inner] if isinstance(inner, Mapping) else [known]
        has_experts = any(place.get(name) for place in places for name in _COUNTS)
        if has_experts and model_type not in _FUSED:
            msg = (
                f"model type {model_type!r} has experts, and no views are known for it: give Stack "
                "and Concat of your own"
            )
            raise UnsupportedError(msg)
        return []
    counts = [known[name] for name in _COUNTS if name in known]
    if counts and not any(counts):
        return []
    stored, fused, (gate, up, down) = _TYPES[model_type]
    layer = f"{prefix}model.layers.{{layer}}"
    experts, into = f"{layer}.{stored}.experts", f"{layer}.{fused}.experts"
    single = {name: f"{experts}.{{expert}}.{name}.weight" for name in (gate, up, down)}
    half = {name: f"{into}.{name}.stacked" for name in (gate, up)}
    router = (f"{layer}.{stored}.gate.weight", f"{layer}.{fused}.gate.weight")
    if fuse:
        return [
            *([Concat(router[0], into=router[1])] if stored != fused else []),
            *(Stack(single[name], into=half[name]) for name in (gate, up)),
            Concat([half[gate], half[up]], into=f"{into}.gate_up_proj", dim=1),
            Stack(single[down], into=f"{into}.down_proj"),
        ]
    return [
        *([Concat(router[1], into=router[0])] if stored != fused else []),
        Split(f"{into}.gate_up_proj", into=[half[gate], half[up]], dim=1),
        *(Unstack(half[name], into=single[name]) for name in (gate, up)),
        Unstack(f"{into}.down_proj", into=single[down]),
    ]


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, which anyone may have written.

    Raises:
        UnsupportedError: it is no JSON object, or too long or too deep for one.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            msg = f"{path} is not a file of at most {_MOST_BYTES:,} bytes"
            raise UnsupportedError(msg, path=path)
        text = file.read(_MOST_BYTES)
    try:
        config = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not the configuration of a model: {error}"
        raise UnsupportedError(msg, path=path) from None
    if not isinstance(config, dict):
        msg = f"{path} is not the configuration of a model: it holds no object"
        raise UnsupportedError(msg, path=path)
    return config
