"""Models of transformers from training checkpoints, and folders that their libraries load."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._url import StrPath, absolute
from dcp_rs.checkpoint.compare import entry_differences
from dcp_rs.checkpoint.folders import checkpoint_path, local_path
from dcp_rs.checkpoint.fused_experts import read_config
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.names import explain_missing, renamer, selector
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.source import IndexSource
from dcp_rs.conversion import ConvertReport, convert
from dcp_rs.conversion.output import new_output
from dcp_rs.errors import CheckpointExistsError, PlanError
from dcp_rs.integrations._experts import single_experts
from dcp_rs.integrations._needs import framework
from dcp_rs.options import Globs, ReadArguments, ReadOptions, Rename, repeatable

#: Modules that a model may be wrapped in: ``model.``, or ``state_dict.model.`` of Lightning.
_PREFIX_PARTS = 3
#: Arguments that are no fields of a configuration.
_OF_THE_MODEL = (
    "dtype",
    "generation_config",
    "quantization_config",
    "torch_dtype",
    "trust_remote_code",
)
#: Endings of files beside the weights: configuration, tokenizer, code.
_BESIDE = frozenset(
    {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".md", ".spm", ".codes", ".tokenizer"}
)
#: The folder of chat templates, if there are several.
_TEMPLATES = "additional_chat_templates"
#: Names of word embeddings, which output weights may be tied to.
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "shared.weight")


class _Slices(Checkpoint):
    """A checkpoint whose slices are read when they are indexed, into memory of their own.

    transformers asks for one slice at a time from each of its threads, and does not announce the
    next. So the slices of a rank are not read in one batch.
    """

    def __init__(self, index: _core.Index, options: ReadOptions) -> None:
        super().__init__(index, options=options)
        self._can_view = False


def from_pretrained(
    cls: Any,
    path: StrPath,
    *,
    config: Any = None,
    rename: Rename = None,
    include: Globs = None,
    exclude: Globs = None,
    allow_partial_load: bool = False,
    read_options: ReadArguments | None = None,
    **kwargs: Any,
) -> Any:
    """Make a model of transformers with the weights of a checkpoint of any kind.

    This is ``cls.from_pretrained`` without a conversion first. transformers makes the model and
    places it, with its dtypes, devices, ties and conversions. dcp-rs reads the weights.

    Args:
        cls: a class of a model (``LlamaForCausalLM``), or an auto class (``AutoModelForCausalLM``).
        path: a checkpoint of dcp-rs, stock DCP or Hugging Face, or a file of ``torch.save``.
            Entries that are not tensors are ignored.
        config: the model's configuration, or its folder or file, which also gives the generation
            configuration. Default: ``config.json`` in ``path``. For a model of the hub, pass
            ``AutoConfig.from_pretrained(name)``, or the folder of ``snapshot_download(name)``.
        rename: from stored names to those of the model, as for :func:`dcp_rs.convert`. By default
            a common prefix (``model.`` in a state dict of model and optimizer) is found, and names
            without it are ignored.
        include, exclude: globs over stored names.
        allow_partial_load: accept a checkpoint that lacks weights of the model. transformers
            initializes them, and says so in its log.
        read_options: see :class:`dcp_rs.options.ReadOptions`.
        kwargs: those of ``from_pretrained``, such as ``dtype``, ``device_map``,
            ``attn_implementation``, ``trust_remote_code``, and fields of the configuration.

    Returns:
        The model. With ``output_loading_info=True``, a tuple of it and transformers' information.

    Raises:
        PlanError: weights of the model are missing, or no single prefix fits.
        ImportError: transformers is not installed.
        CheckpointNotFoundError, CorruptIndexError, CorruptDataError: see :mod:`dcp_rs.errors`.
    """
    framework("transformers", "transformers")
    options = ReadOptions(**(read_options or {}))
    index = open_index(path, verify=options.verify is True)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    place = Path(config) if isinstance(config, str | os.PathLike) else folder
    config, kwargs = _config(cls, config, place, kwargs)
    stored = stored_tensors(index, include, exclude)
    skeleton = skeleton_of(cls, config, trust_remote_code=kwargs.get("trust_remote_code"))
    config = _own_config(type(skeleton), config)
    names = list(skeleton.state_dict())
    numbers = numbers_in_model(index, stored, names, rename)
    slices = _Slices(index, options=options)
    state = {name: slices.get_slice(index.name(number)) for name, number in numbers.items()}
    if (
        kwargs.get("dtype", kwargs.get("torch_dtype", "auto")) in (None, "auto")
        and config.dtype is None
    ):
        # transformers would look into the tensors.
        kwargs["dtype"] = next(
            (s.dtype for s in state.values() if s.dtype.is_floating_point),
            torch.get_default_dtype(),
        )
    if "generation_config" not in kwargs and type(skeleton).can_generate():
        kwargs["generation_config"] = _generation_config(place.parent if place.is_file() else place)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **kwargs
    )
    if not allow_partial_load:
        check_missing(index, info["missing_keys"], names, stored)
    return (model, info) if wants_info else model


def check_missing(
    index: _core.Index, missing: Iterable[str], names: Iterable[str], stored: Collection[str]
) -> None:
    """Raise if a checkpoint lacks weights of a model.

    Args:
        index: the index of the checkpoint.
        missing: the names of the weights that it lacks.
        names: the names of all weights of the model.
        stored: the names in the checkpoint.

    Raises:
        PlanError: there are missing weights.
    """
    if missing := sorted(missing):
        path = checkpoint_path(index)
        msg = f"{path} lacks {len(missing)} weights of the model, {missing[0]!r} first"
        msg += explain_missing(missing, list(names), stored)
        raise PlanError(msg, path=path, tensor=missing[0])


def _config(
    cls: Any, config: Any, place: Path, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a copy of the configuration or that at a place, and the other arguments."""
    transformers = framework("transformers", "transformers")
    if isinstance(config, transformers.PreTrainedConfig):
        return copy.deepcopy(config), kwargs
    if not place.is_file() and not (place / "config.json").is_file():
        msg = (
            f"there is no config.json in {place}: say which model it is with config=, a folder or "
            "a configuration, such as AutoConfig.from_pretrained(name)"
        )
        raise FileNotFoundError(msg)
    of_model = {name: kwargs.pop(name) for name in _OF_THE_MODEL if name in kwargs}
    trusted = {name: of_model[name] for name in ("trust_remote_code",) if name in of_model}
    maker = (
        getattr(cls, "config_class", None) or transformers.AutoConfig
    )  # as transformers itself does
    found, unused = maker.from_pretrained(place, return_unused_kwargs=True, **trusted, **kwargs)
    return found, unused | of_model


def _own_config(cls: Any, config: Any) -> Any:
    """Return the part of a composite configuration that auto classes choose for the model class."""
    text = config.sub_configs.get("text_config")
    if text is None or getattr(cls, "config_class", None) != text:
        return config
    own = config.get_text_config()
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        own.quantization_config = quantization
    return own


def _generation_config(folder: Path) -> Any:
    """Return the generation configuration of a model's folder, or that in its configuration."""
    maker = framework("transformers", "transformers").GenerationConfig
    for name, how in (
        ("generation_config.json", {}),
        ("config.json", {"_from_model_config": True}),
    ):
        if (folder / name).is_file():
            return maker.from_pretrained(folder, config_file_name=name, **how)
    return None


def skeleton_of(cls: Any, config: Any, *, trust_remote_code: bool | None = None) -> Any:
    """Return the model on meta, of the class that an auto class chooses."""
    make = getattr(cls, "from_config", None)  # of auto classes
    with torch.device("meta"):
        return (
            cls._from_config(config)
            if make is None
            else make(config, trust_remote_code=trust_remote_code)
        )


def stored_tensors(index: _core.Index, include: Globs, exclude: Globs) -> dict[str, int]:
    """Return the numbers of the stored tensors that are chosen, by name."""
    chosen = selector(include, exclude)
    return {
        name: number
        for number, name in enumerate(index.names())
        if not index.tensor(number).is_bytes and chosen(name)
    }


def numbers_in_model(
    index: _core.Index, stored: Mapping[str, int], names: Iterable[str], rename: Rename
) -> dict[str, int]:
    """Return the numbers of stored tensors by their names in the model, which has ``names``.

    Raises:
        PlanError: no single prefix fits, or ``rename`` gives two tensors one name.
    """
    if rename is None:
        prefix = _prefix(stored, names)
        with_prefix = (name for name in stored if name.startswith(prefix))
        return {name.removeprefix(prefix): stored[name] for name in with_prefix}
    new_name = renamer(rename)
    numbers: dict[str, int] = {}
    for name, number in stored.items():
        other = numbers.setdefault(new_name(name), number)
        if other != number:
            msg = f"{index.name(other)!r} and {name!r} would both be named {new_name(name)!r}"
            raise PlanError(msg, path=checkpoint_path(index), tensor=name)
    return numbers


def _prefix(stored: Iterable[str], names: Iterable[str]) -> str:
    """Return the prefix of a model's names in a checkpoint.

    Raises:
        PlanError: several prefixes fit equally well.
    """
    known = set(names)
    found: dict[str, int] = {}
    for name in stored:
        at = 0
        for _ in range(_PREFIX_PARTS + 1):
            if name[at:] in known:
                found[name[:at]] = found.get(name[:at], 0) + 1
            at = name.find(".", at) + 1
            if at == 0:
                break
    most = max(found.values(), default=0)
    best = [prefix for prefix, number in found.items() if number == most]
    if len(best) > 1:
        msg = (
            f"the weights of the model are there under {' and '.join(map(repr, sorted(best)))}: "
            f"include={min(best) + '*'!r} chooses the first"
        )
        raise PlanError(msg)
    return best[0] if best else ""


def save_pretrained(
    path: StrPath,
    out: StrPath,
    *,
    config: StrPath | None = None,
    rename: Rename = None,
    include: Globs = None,
    exclude: Globs = None,
    dtype: torch.dtype | str | None = None,
    shards: int | None = None,
) -> ConvertReport:
    """Write a checkpoint of any kind as a folder that transformers, diffusers or peft load.

    Memory stays bounded, and no model is made. The folder appears in one step, when it is complete.
    If the configuration says ``"tie_word_embeddings": true``, output weights that equal the
    embeddings are left out, as transformers does.

    Args:
        path: the checkpoint.
        out: the new folder. It may exist if it is empty.
        config: a folder with the model's configuration, tokenizer and code, which are copied. Its
            files decide the names: ``adapter_config.json`` belongs to peft, and a ``_class_name``
            in ``config.json`` to diffusers. Default: ``path``, if it is a folder.
        rename, include, exclude, dtype: as for :func:`dcp_rs.convert`. Use ``rename={"model": ""}``
            and ``include="model.*"`` to take a model out of a training state. Fused experts of
            transformers 5 are exported one by one, under the names of the hub. Globs and
            ``rename`` apply to those.
        shards: the number of files. Default: as many as keep each below 5 GB. Peft reads one.

    Raises:
        CheckpointExistsError: ``out`` exists, or was created meanwhile.
        FileNotFoundError: there is no configuration.
        ValueError: several files for peft.
        Exception: as :func:`dcp_rs.convert`.
    """
    source = local_path(config) if config is not None else local_path(path)
    beside = _beside(source)
    configs = ("adapter_config.json", "config.json")
    config_name = next((name for name in configs if name in beside), None)
    if config_name is None:
        msg = (
            f"there is no config.json or adapter_config.json in {source}: "
            "config= says where the model's configuration is"
        )
        raise FileNotFoundError(msg)
    if config_name == "adapter_config.json":
        if shards not in (None, 1):
            msg = f"shards={shards!r}: peft reads an adapter from one file"
            raise ValueError(msg)
        shards = 1
    target = absolute(local_path(out))
    before = _core.fingerprint(target)
    if before is not None and not (target.is_dir() and not any(target.iterdir())):
        msg = f"{target} exists: remove it first, or choose another folder"
        raise CheckpointExistsError(msg, path=target)
    index = open_index(path)
    include, exclude = repeatable(include), repeatable(exclude)
    chosen, new_name = selector(include, exclude), renamer(rename)
    names = {name: new_name(name) for name in index.names() if chosen(name)}
    views = single_experts(names, source) if config_name == "config.json" else []
    tied = _tied_head(index, stored_tensors(index, include, exclude), beside[config_name], rename)
    if tied:
        left_out = [exclude] if isinstance(exclude, str) else list(exclude or ())
        exclude = [*left_out, *map(escape, tied)]
    with new_output(target, before) as made:
        report = convert(
            path,
            made,
            to="safetensors",
            rename=rename,
            include=include,
            exclude=exclude,
            dtype=dtype,
            shards=shards,
            name=_stem(beside[config_name]),
            views=views,
        )
        report.tied.update({new_name(head): new_name(kept) for head, kept in tied.items()})
        for name, file in beside.items():
            (made / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, made / name)
    return report


def _tied_head(
    index: _core.Index, stored: Collection[str], config: Path, rename: Rename
) -> dict[str, str]:
    """Find output weights that equal the embeddings, if the configuration ties the two.

    Returns:
        Their stored name, and that of the embeddings. transformers stores one of the two, and ties
        them again as it loads.
    """
    said = read_config(config)
    text = said.get("text_config")
    parts = [said, text] if isinstance(text, dict) else [said]
    if not any(part.get("tie_word_embeddings") is True for part in parts):
        return {}
    new_name, source = renamer(rename), IndexSource(index, ReadOptions())
    items = [item for item in source.items if item.name in stored]
    heads = [item for item in items if f".{new_name(item.name)}".endswith(".lm_head.weight")]
    return {
        head.name: item.name
        for head in heads[:1]
        for item in items
        if item.name.endswith(_EMBEDDINGS)
        and not any(entry_differences(source, source, [(head, item)]))
    }


def _beside(folder: Path) -> dict[str, Path]:
    """Return the files beside the weights of a model's folder, by their paths within it."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [file for file in files if _is_beside(file.name)]
    files += sorted((folder / _TEMPLATES).glob("*.jinja"))
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def _is_beside(name: str) -> bool:
    """Return whether a file of this name belongs beside the weights."""
    # Mistral has ``tokenizer.model.v3``.
    is_beside = Path(name).suffix in _BESIDE or name.startswith("tokenizer.model.")
    return is_beside and not name.endswith(".index.json")


def _stem(config: Path) -> str:
    """Return the stem of the names of files of weights."""
    if config.name == "adapter_config.json":
        return "adapter_model"
    return "diffusion_pytorch_model" if "_class_name" in read_config(config) else "model"
