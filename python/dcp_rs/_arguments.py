"""Wrong calls: the error names the option, the function or the attribute that is meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar

__all__ = ["check_arguments", "equivalent", "suggest", "suggest_option"]

P = ParamSpec("P")
R = TypeVar("R")

_PATH = ("path=", "root=", "filename=")
_NO_EFFECT = ("it has no equivalent here: leave it out",)
_OF_TORCH = ("torch's own functions take it, with RsReader(path) or RsWriter(path)",)
_OF_HUB = ("the Hub is not read: pass the path that huggingface_hub.snapshot_download() returns",)
_EXTRA = ("extra={'scheduler': scheduler, 'step': step} takes whatever else is to be saved",)
_OF_PLANNERS = ("dcp_rs.load(), dcp_rs.save() and the planners take it",)

#: Names in other libraries, and what to write here. A text that begins with a name, such as
#: ``device=``, is for functions or objects that have it; the first text that fits is taken. A name
#: may follow the function that it is for, as in ``CheckpointManager.overwrite``. ``load()`` is a
#: call of ``load`` that lacks an argument.
_FOREIGN: dict[str, tuple[str, ...]] = {
    # torch.distributed.checkpoint
    "checkpoint_id": (*_PATH, "storage_reader=RsReader(path) is the checkpoint"),
    "storage_reader": ("path= takes its path; dcp_rs.load_state_dict() takes a reader",),
    "storage_writer": ("path= takes its path; torch's dcp.save() takes a writer",),
    "async_stager": ("stager=",),
    "thread_count": ("threads=",),
    "sync_files": ("fsync=",),
    **dict.fromkeys(("use_collectives", "coordinator_rank", "async_checkpointer_type"), _OF_TORCH),
    **dict.fromkeys(("single_file_per_rank", "per_thread_copy_ahead"), _NO_EFFECT),
    **dict.fromkeys(("cache_staged_state_dict", "serialization_format"), _NO_EFFECT),
    **dict.fromkeys(("dtype", "rename", "include", "exclude"), _OF_PLANNERS),
    "open.dtype": ("tensors have their stored dtype: call .to(dtype)",),
    "load_file.dtype": ("tensors have their stored dtype: call .to(dtype)",),
    "FileSystemReader": ("RsReader",),
    "FileSystemWriter": ("RsWriter",),
    "DefaultLoadPlanner": ("RsLoadPlanner",),
    "DefaultSavePlanner": ("RsSavePlanner",),
    "HuggingFaceStorageReader": ("RsReader",),
    "HuggingFaceStorageWriter": (
        "dcp_rs.convert(path, out, to='safetensors') writes such folders",
    ),
    "load_state_dict()": (
        "dcp_rs.load(state_dict, path) fills a state dict; dcp_rs.open(path) reads tensors by name",
    ),
    # torch.load, torch.save, Module.load_state_dict
    "f": _PATH,
    "obj": ("state_dict=", "tensors="),
    "map_location": ("device=", "tensors are filled where they are: leave it out"),
    "mmap": ("io='mmap' reads through a mapping", "backend='mmap' returns views of the file"),
    "pickle_module": ("weights_only=False unpickles anything",),
    "strict": (
        "allow_partial_load=True does what strict=False does elsewhere",
        "partial=True does what strict=False does elsewhere",
        "dcp_rs.load(..., allow_partial_load=True) does what strict=False does elsewhere",
    ),
    "load()": (
        "dcp_rs.load(state_dict, path) fills a state dict; dcp_rs.open(path) reads tensors by name",
    ),
    # safetensors and Transformers
    **dict.fromkeys(("tensors", "state"), ("state_dict=",)),
    "state_dict": ("tensors=",),
    "path": (*_PATH, "storage_reader=RsReader(path) is the checkpoint"),
    "filename": ("path=", "step_name="),
    "save_directory": ("out=", *_PATH),
    "pretrained_model_name_or_path": _PATH,
    "torch_dtype": ("dtype=", "tensors have their stored dtype: call .to(dtype)"),
    "device_map": ("device=",),
    "ignore_mismatched_sizes": (
        "allow_partial_load=True leaves tensors of another shape alone",
        "partial=True leaves tensors of another shape alone",
    ),
    "max_shard_size": ("shards=N writes N data files",),
    "safe_serialization": ("to='safetensors' is the format",),
    "format": ("to=",),
    **dict.fromkeys(("revision", "subfolder", "cache_dir", "local_files_only"), _OF_HUB),
    **dict.fromkeys(("src", "source", "input"), _PATH),
    **dict.fromkeys(("dst", "destination", "output"), ("out=",)),
    "safe_open": ("open",),
    "load_model": ("dcp_rs.load(model.state_dict(), path) fills a model",),
    "save_model": ("dcp_rs.save_file(model.state_dict(), path) writes one file",),
    # Orbax
    "directory": _PATH,
    "max_to_keep": ("keep_last=",),
    "keep_period": ("keep_every=",),
    "keep_time_interval": ("keep_within=",),
    "best_fn": ("metric= is the name of a metric, and keep_best= the number of steps to keep",),
    "best_mode": ("mode=",),
    "step_prefix": ("step_name=",),
    "options": ("pass the options as arguments of their own",),
    "create": ("the first save creates the folder: leave it out",),
    "item_names": ("a step is one state dict, with any keys",),
    "async_options": ("async_save() saves in the background",),
    **dict.fromkeys(("args", "items"), ("state_dict=",)),
    "restore": ("load",),
    "all_steps": ("steps",),
    "wait_until_finished": ("wait",),
    "reached_preemption": ("preempted",),
    **dict.fromkeys(("Manager", "Checkpointer", "ModelCheckpoint"), ("CheckpointManager",)),
    # Lightning, the Trainer, accelerate, torchtitan
    **dict.fromkeys(("dirpath", "output_dir", "folder"), ("root=", "path=", "out=")),
    "monitor": ("metric=",),
    "metric_for_best_model": ("metric=",),
    "greater_is_better": ("mode='max' keeps the highest",),
    "save_top_k": ("keep_best=",),
    "save_last": ("latest=True lets `latest` lead to the newest step, which always stays",),
    **dict.fromkeys(("save_total_limit", "total_limit", "keep_latest_k"), ("keep_last=",)),
    **dict.fromkeys(("save_interval_steps", "every_n_train_steps"), ("save_every=",)),
    **dict.fromkeys(("save_steps", "interval"), ("save_every=",)),
    "every_n_epochs": ("save_every= counts steps",),
    # between functions of this package
    "optimizer": ("optimizers=",),
    **dict.fromkeys(("scheduler", "lr_scheduler", "step", "epoch", "extra_state", "rng"), _EXTRA),
    "allow_partial_load": ("partial=True does the same",),
    "load_training_state.planner": ("it takes the options of RsLoadPlanner itself",),
    "load_optim_state_dict.planner": ("it takes the options of RsLoadPlanner itself",),
    "CheckpointManager.overwrite": ("save(step, state_dict, force=True) replaces a step",),
    "CheckpointManager.save_id": ("each step gets a new one",),
    "CheckpointManager.parent": ("reuse= takes unchanged tensors from the step before",),
    "overwrite": ("force=",),
    "force": ("overwrite=",),
    **dict.fromkeys(("remove", "delete", "dry_run"), ("yes=True removes what it lists",)),
    "diff": ("on the command line: dcp-rs diff A B",),
    # commands
    **dict.fromkeys(("cat", "print", "dump", "head", "get"), ("show",)),
    **dict.fromkeys(("info", "describe", "meta", "metadata"), ("inspect",)),
    **dict.fromkeys(("list", "keys", "dir"), ("ls",)),
    **dict.fromkeys(("check", "validate", "fsck"), ("verify",)),
    **dict.fromkeys(("compare", "cmp"), ("diff",)),
    **dict.fromkeys(("rm", "gc"), ("prune",)),
    **dict.fromkeys(("average", "avg"), ("merge",)),
    **dict.fromkeys(("export", "consolidate", "reshard"), ("convert",)),
    # options of stores, in fsspec, boto3 and Hugging Face
    "anon": ("skip_signature=", "storage_options={'skip_signature': True} sends no credentials"),
    "key": ("aws_access_key_id=", "storage_options={'aws_access_key_id': ...}"),
    "secret": ("aws_secret_access_key=", "storage_options={'aws_secret_access_key': ...}"),
    "region_name": ("aws_region=", "storage_options={'aws_region': ...}"),
    "endpoint_url": ("storage_options={'aws_endpoint': ...}",),
    "client_kwargs": ("aws_endpoint and aws_region are options of their own",),
    "profile": ("profiles are not read: pass aws_access_key_id and aws_secret_access_key",),
    # schemes of URLs
    "gcs": ("use gs://",),
    "hf": _OF_HUB,
    "dbfs": ("use the path below /dbfs",),
    **dict.fromkeys(("s3a", "s3n"), ("use s3://",)),
    **dict.fromkeys(("abfs", "abfss", "adl", "wasb", "wasbs", "azure"), ("use az://CONTAINER/",)),
    **dict.fromkeys(("r2", "minio", "oss"), ("use s3:// with the option aws_endpoint",)),
}


def equivalent(name: str, known: Collection[str] = (), owner: str = "") -> str | None:
    """Return what to write in place of a name of another library, or None.

    Args:
        name: the name of an option, an attribute or the scheme of a URL.
        known: the names that there are.
        owner: the function or the class.
    """
    for text in _FOREIGN.get(f"{owner}.{name}") or _FOREIGN.get(name, ()):
        own = text.partition("=")[0]
        if own in known or not own.isidentifier():
            is_name = own.isidentifier() and text.rstrip("=") == own
            return f"use {text}" if is_name else text
    return None


def suggest(name: str, known: Collection[str], owner: str = "") -> str | None:
    """Return the equivalent of a name, or the nearest name that is known, or None.

    The arguments are those of :func:`equivalent`.
    """
    import difflib  # slow to import, for mistakes only

    # Names of other libraries that are only a little like one of ours mean something else.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return equivalent(name, known, owner) or (f"did you mean {near[0]!r}?" if near else None)


class _Omitted:
    """Default of an option that the docstring tells."""

    def __repr__(self) -> str:
        return "..."


def _named_options(function: Callable[..., Any]) -> Signature:
    """Return a signature with the keys of ``**options: Unpack[Arguments]`` as arguments.

    ``help`` and completion of a shell then show them, as editors do.
    """
    shown = signature(function)
    *known, last = shown.parameters.values() or [Parameter("_", Parameter.KEYWORD_ONLY)]
    if last.kind is not Parameter.VAR_KEYWORD:
        return shown
    arguments = function.__globals__[str(last.annotation)[len("Unpack[") : -1]]
    for name, kind in arguments.__annotations__.items():
        annotation = kind.__forward_arg__
        known.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=_Omitted(), annotation=annotation)
        )
    return shown.replace(parameters=known)


def suggest_option(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that a call with an unknown option names the right one.

    A function with ``**options: Unpack[Arguments]`` passes them to :func:`check_arguments`, on all
    ranks if several take part.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            passed = tuple(kwargs)
            del args, kwargs  # tools show them with a traceback, and options of a store are secret
            # Without a second frame, the call itself failed: its arguments do not fit.
            is_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
            if is_call and isinstance(error, TypeError):
                check_arguments(call, passed)
                for advice in _FOREIGN.get(f"{function.__qualname__}()", ()):
                    raise TypeError(f"{error}: {advice}") from None
            raise

    call.__signature__ = _named_options(function)  # type: ignore[attr-defined]
    return call


def check_arguments(function: Callable[..., Any], passed: Iterable[str]) -> None:
    """Check that a public function takes all of the keyword arguments.

    Args:
        function: the function that the caller called, with :func:`suggest_option`.
        passed: the names of the arguments.

    Raises:
        TypeError: the function does not take one. The message suggests another.
    """
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    known = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind in kinds and not name.startswith("_") and name != "self"
    ]
    unknown = next((name for name in passed if name not in known), None)
    if unknown is None:
        return
    is_class = function.__name__ == "__init__"
    called = function.__qualname__.removesuffix(".__init__")
    hint = suggest(unknown, known, called)
    module = "dcp_rs.optim" if function.__module__ == "dcp_rs.optim" else "dcp_rs"
    shown = called if is_class or "." in called else f"{module}.{called}"
    msg = f"{shown}{'' if is_class else '()'} has no option {unknown!r}"
    raise TypeError(msg if hint is None else f"{msg}: {hint}") from None
