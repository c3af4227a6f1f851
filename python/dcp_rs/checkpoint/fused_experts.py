"""Views between the experts of a mixture as folders of Hugging Face have them, one by one, and as transformers fuses them since version 5."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.views import Concat, LayoutView, Split, Stack, Unstack
from dcp_rs.errors import UnsupportedError

__all__ = ["views_for"]

#: Where experts are in a layer, in files and in the model, and what the gate, up and down
#: projections are called in files (transformers' ``conversion_mapping.py``).
_QWEN = ("mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
_MIXTRAL = ("block_sparse_moe", "mlp", ("w1", "w3", "w2"))
_TYPES = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
        _QWEN,
    ),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), _QWEN),
    **dict.fromkeys(("mixtral", "minimax"), _MIXTRAL),
    "phimoe": ("mlp", "mlp", ("w1", "w3", "w2")),
    "lfm2_moe": ("feed_forward", "feed_forward", ("w1", "w3", "w2")),
    "jamba": ("feed_forward", "feed_forward", ("gate_proj", "up_proj", "down_proj")),
}
#: These are fused in files, too.
_FUSED = {"gpt_oss", "granitemoe", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}
#: How configurations call the number of experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def views_for(
    config: Mapping[str, Any] | str | os.PathLike[str] | Any, *, fuse: bool = True, prefix: str = ""
) -> list[LayoutView]:
    """Return the views from the names of experts in folders of Hugging Face to the fused names of transformers 5.

    Args:
        config: a configuration of transformers, its dict, or a folder with a ``config.json``.
        fuse: ``False`` gives the views the other way, from fused names to those of single experts.
        prefix: what all names of the model begin with in the checkpoint: ``"model."`` in a state
            dict of model and optimizer.

    Returns:
        Views for ``views=``, none for a model that has no experts, or whose files have them fused.

    Raises:
        UnsupportedError: a mixture of experts of a type that is not known.

    Example:
        ```python
        views = dcp_rs.views_for({"model_type": "qwen3_moe", "num_experts": 128})
        assert views[-1].into == "model.layers.{layer}.mlp.experts.down_proj"
        ```
    """
    if isinstance(config, str | os.PathLike):
        config = json.loads((Path(config) / "config.json").read_text())
    known = config if isinstance(config, Mapping) else config.to_dict()
    kind = known.get("model_type")
    if kind not in _TYPES:
        inner = known.get("text_config")
        places = [known, inner] if isinstance(inner, Mapping) else [known]
        if kind not in _FUSED and any(place.get(name) for place in places for name in _COUNTS):
            msg = f"model type {kind!r} has experts, and no views are known for it: give Stack and Concat of your own"
            raise UnsupportedError(msg)
        return []
    stored, fused, (gate, up, down) = _TYPES[kind]
    layer = f"{prefix}model.layers.{{layer}}"
    experts, into = f"{layer}.{stored}.experts", f"{layer}.{fused}.experts"
    single = {name: f"{experts}.{{expert}}.{name}.weight" for name in (gate, up, down)}
    half = {name: f"{into}.{name}.stacked" for name in (gate, up)}
    router = (f"{layer}.{stored}.gate.weight", f"{layer}.{fused}.gate.weight")
    moves = stored != fused
    if fuse:
        return [
            *([Concat(router[0], into=router[1])] if moves else []),
            *(Stack(single[name], into=half[name]) for name in (gate, up)),
            Concat([half[gate], half[up]], into=f"{into}.gate_up_proj", dim=1),
            Stack(single[down], into=f"{into}.down_proj"),
        ]
    return [
        *([Concat(router[1], into=router[0])] if moves else []),
        Split(f"{into}.gate_up_proj", into=[half[gate], half[up]], dim=1),
        *(Unstack(half[name], into=single[name]) for name in (gate, up)),
        Unstack(f"{into}.down_proj", into=single[down]),
    ]
