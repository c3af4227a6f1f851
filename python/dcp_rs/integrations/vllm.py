"""vLLM serves models from training checkpoints, with ``load_format="dcp_rs"``.

vLLM finds :func:`register` by its entry point.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs._reports import size
from dcp_rs.checkpoint.entries import describe
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.stream import stream
from dcp_rs.checkpoint.views import Views
from dcp_rs.errors import PlanError
from dcp_rs.integrations._experts import names_of_rank, single_experts
from dcp_rs.integrations._needs import framework
from dcp_rs.integrations.transformers import (
    check_missing,
    numbers_in_model,
    skeleton_of,
    stored_tensors,
)
from dcp_rs.options import ReadOptions

_loaders: Any = framework("vllm.model_executor.model_loader", "vllm")
#: Fields of ``model_loader_extra_config`` that are no options of reading.
_OWN = ("checkpoint", "rename", "include", "exclude", "allow_partial_load")

#: A logger below vLLM's own, so that its lines are in the log of the server.
_log = logging.getLogger("vllm.dcp_rs")


@cache  # vLLM may call it more than once
def register() -> None:
    """Register ``load_format="dcp_rs"`` with vLLM in this process. vLLM calls it by itself."""
    _loaders.register_model_loader("dcp_rs")(DcpRsModelLoader)


class DcpRsModelLoader(_loaders.BaseModelLoader):  # type: ignore[misc]
    """Model loader for vLLM: ``vllm serve FOLDER --load-format dcp_rs``.

    Pass ``--model-loader-extra-config '{"checkpoint": "run/step-100"}'`` for another checkpoint.
    The folder, or a name of the hub, has the configuration and the tokenizer. It reads the model's
    tensors in the order of the files, ahead of vLLM, which cuts them for its ranks. Memory stays
    bounded. It does not read an optimizer that is in the checkpoint. It splits fused experts of
    transformers into single ones. With vLLM's ``--enable-expert-parallel
    --enable-ep-weight-filter``, a rank does not read the weights of experts that other ranks hold.
    It skips none with EPLB, where a rank may hold any expert. The log says how many bytes the rank
    read, and how many it skipped.

    ``model_loader_extra_config`` may have:

    - ``checkpoint``: the weights: a checkpoint of dcp-rs, stock DCP or Hugging Face, or a file of
      ``torch.save``. Default: the model's folder.
    - ``rename``: a mapping from stored names to those of the model in transformers, as for
      :func:`dcp_rs.convert`. By default a common prefix (``model.`` in a state dict of model and
      optimizer) is found. With ``rename``, all entries that ``include`` and ``exclude`` leave
      belong to the model.
    - ``include``, ``exclude``: globs over stored names.
    - ``allow_partial_load``: accept a checkpoint that lacks weights of the model.
    - fields of :class:`dcp_rs.options.ReadOptions`.

    Raises:
        TypeError, ValueError: an unknown option, or an invalid value.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config
        if not isinstance(extra, Mapping):
            msg = f"model_loader_extra_config is a {type(extra).__name__}: a mapping is wanted"
            raise TypeError(msg)
        self._own = {name: extra[name] for name in _OWN if name in extra}
        self._options = ReadOptions(
            **{name: value for name, value in extra.items() if name not in _OWN}
        )

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint exists. Nothing is downloaded.

        Raises:
            CheckpointNotFoundError, CorruptIndexError: see :mod:`dcp_rs.errors`.
        """
        self._index(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights into a model of vLLM.

        Raises:
            PlanError: weights of the model are missing, no single prefix fits, or ``rename`` gives
                two of them one name.
            CheckpointNotFoundError, CorruptIndexError, CorruptDataError: see :mod:`dcp_rs.errors`.
        """
        index = self._index(model_config)
        names = self._names(index, model_config.hf_config)
        views = single_experts(
            {index.name(number): name for number, name in names.items()}, model_config.hf_config
        )
        if views:
            index = Views.of(False, views).apply(index)
            names = self._names(index, model_config.hf_config)
        wanted = _names_to_read(names.values(), model_config)
        skipped = (number for number, name in names.items() if name not in wanted)
        skipped_bytes = sum(describe(index, number).nbytes for number in skipped)
        names = {number: name for number, name in names.items() if name in wanted}
        new_names = {index.name(number): name for number, name in names.items()}
        device, counts = next(model.parameters()).device, Counts()
        if device.type == "meta":
            device = torch.device("cpu")
        weights = stream(index, device, self._options, _no_value, numbers=names, counts=counts)
        loaded = model.load_weights((new_names[stored], tensor) for stored, tensor in weights)
        _log.info(
            "read %s of %s; skipped %s of experts of other ranks",
            size(counts.read),
            checkpoint_path(index),
            size(skipped_bytes),
        )
        # Models of vLLM return the names of the parameters that they loaded. Quantized models have
        # parameters that no checkpoint has.
        if (
            loaded is None
            or model_config.quantization is not None
            or self._own.get("allow_partial_load", False)
        ):
            return
        missing = {name for name, _ in model.named_parameters()} - set(loaded)
        check_missing(index, missing, missing, index.names())

    def _index(self, model_config: Any) -> _core.Index:
        path = self._own.get("checkpoint", model_config.model)
        return open_index(path, verify=self._options.verify is True)

    def _names(self, index: _core.Index, config: Any) -> dict[int, str]:
        """Return the names in transformers of the model's tensors, by number."""
        stored = stored_tensors(index, self._own.get("include"), self._own.get("exclude"))
        rename = self._own.get("rename")
        names = _names_in_transformers(config) if rename is None else ()
        numbers = numbers_in_model(index, stored, names, rename)
        return {number: name for name, number in numbers.items()}


def _names_to_read(names: Collection[str], model_config: Any) -> set[str]:
    """Return the names of the tensors that this rank reads: all, unless vLLM skips experts."""
    config = framework("vllm.config", "vllm").get_current_vllm_config_or_none()
    parallel = None if config is None else config.parallel_config
    skips = getattr(parallel, "enable_expert_parallel", False) and getattr(
        parallel, "enable_ep_weight_filter", False
    )
    # With EPLB, a rank has slots for copies of any expert.
    if parallel is None or not skips or parallel.enable_eplb or not model_config.is_moe:
        return set(names)
    group = framework("vllm.distributed", "vllm").get_ep_group()
    return names_of_rank(
        names,
        rank=group.rank_in_group,
        size=group.world_size,
        experts=model_config.get_num_experts(),
        placement=parallel.expert_placement_strategy,
    )


def _names_in_transformers(config: Any) -> list[str]:
    """Return the names of the model's state dict, if transformers has the model."""
    transformers = framework("transformers", "transformers")
    classes = (
        getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()
    )
    cls = next((cls for cls in classes if cls is not None), None)
    return [] if cls is None else list(skeleton_of(cls, config).state_dict())


def _no_value(name: str) -> Any:
    msg = f"{name!r} is not a tensor"
    raise PlanError(msg, tensor=name)
