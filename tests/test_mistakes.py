"""Mistakes that people make, each answered by a sentence that names the mend."""

import inspect
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from dcp_rs._arguments import foreign
from dcp_rs._url import _OPTIONS
from dcp_rs.checkpoint.names import explain_missing, natural, nearest
from dcp_rs.cli import main
from dcp_rs.cli.app import COMMANDS
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    EntryNotFoundError,
    PlanError,
    UnsupportedError,
)
from support.both import save_rs, save_stock

MODEL = {f"layers.{i}.{part}": torch.ones(2) for i in range(3) for part in ("weight", "bias")}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Where everything is that the mistakes are made with."""
    folder = tmp_path_factory.mktemp("world")
    save_rs(MODEL, folder / "bare")
    save_rs({f"model.{name}": value for name, value in MODEL.items()}, folder / "model")
    save_rs({f"module.{name}": value for name, value in MODEL.items()}, folder / "ddp")
    save_rs({"epoch": 3, "embedding.weight": torch.ones(2)}, folder / "named")
    save_rs({f"layers.{i}.weight": torch.ones(1) for i in (77, 777, 13777)}, folder / "deep")
    for part in ("unet", "vae"):
        (folder / "pipeline" / part).mkdir(parents=True)
        dcp_rs.save_file(
            {"w": torch.ones(1)}, folder / "pipeline" / part / "diffusion_pytorch_model.safetensors"
        )
    (folder / "pipeline" / "model_index.json").write_text("{}")
    dcp_rs.optim.save_training_state(
        folder / "training", torch.nn.Linear(2, 2), extra={"n": torch.ones(2)}, no_dist=True
    )
    (folder / "notes.txt").write_text("lr 3e-4")
    save_stock(MODEL, folder / "stock")
    for step in (2, 10, 9):
        shutil.copytree(folder / "bare", folder / "run" / f"step-{step}")
    save_stock({"w": torch.ones(2)}, folder / "single")
    (folder / "alone").mkdir()
    shutil.copy(folder / "stock" / "__0_0.distcp", folder / "alone")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "empty").mkdir()
    torch.save(MODEL, folder / "model.pt")
    return folder


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: torch.zeros(2) for name in MODEL}


def load(state: Any, path: Any, **options: Any) -> None:
    dcp_rs.load(state, path, no_dist=True, **options)


def save(state: Any, path: Any, **options: Any) -> None:
    dcp_rs.save(state, path, no_dist=True, **options)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def cyclic(container: Any) -> Any:
    """Return a container that contains itself."""
    if isinstance(container, list):
        container.append(container)
    else:
        container["self"] = container
    return container


def command(*arguments: Any) -> None:
    main([str(argument) for argument in arguments])


#: What somebody does, how, the error, and words of its message.
Mistake = tuple[str, Callable[[Path], Any], type[BaseException], str]
MISTAKES: list[Mistake] = [
    # names
    ("a letter", lambda w: dcp_rs.open(w / "named")["epohc"], EntryNotFoundError, "did you mean 'epoch'?"),
    ("a letter, of a slice", lambda w: dcp_rs.open(w / "named").get_slice("embedding.wieght"), EntryNotFoundError, "did you mean 'embedding.weight'?"),
    ("a prefix too few", lambda w: dcp_rs.open(w / "model")["layers.0.weight"], EntryNotFoundError, "it is stored as 'model.layers.0.weight'"),
    ("a prefix too many", lambda w: dcp_rs.open(w / "bare")["module.layers.0.weight"], EntryNotFoundError, "it is stored as 'layers.0.weight'"),
    ("another prefix", lambda w: dcp_rs.open(w / "model")["module.layers.0.weight"], EntryNotFoundError, "did you mean 'model.layers.0.weight'?"),
    ("a letter, in the state dict", lambda w: load({"epohc": 0}, w / "named"), PlanError, "did you mean 'epoch'?"),
    ("DDP's prefix", lambda w: load(prefixed("module."), w / "bare"), PlanError, "pass rename={'': 'module'}"),
    ("the compiler's prefix", lambda w: load(prefixed("_orig_mod."), w / "bare"), PlanError, "pass rename={'': '_orig_mod'}"),
    ("two prefixes", lambda w: load(prefixed("module._orig_mod."), w / "bare"), PlanError, "pass rename={'': 'module._orig_mod'}"),
    ("no prefix", lambda w: load(prefixed(""), w / "model"), PlanError, "its names begin with 'model.': pass rename={'model': ''}"),
    ("DDP's for the model's", lambda w: load(prefixed("model."), w / "ddp"), PlanError, "pass rename={'module': 'model'}"),
    ("a rename the wrong way", lambda w: load({"epoch": 0}, w / "named", rename={"epoch": "epocs"}), PlanError, "rename= gives this name to no entry; did you mean 'epocs'?"),
    ("a letter beside a number", lambda w: dcp_rs.open(w / "deep")["layers.777.wieght"], EntryNotFoundError, "did you mean 'layers.777.weight'?"),
    ("a container", lambda w: dcp_rs.open(w / "model")["model.layers"], EntryNotFoundError, "it is a container of 6 entries, such as 'model.layers.0.bias'"),
    ("a container of one entry", lambda w: dcp_rs.open(w / "named")["embedding"], EntryNotFoundError, "it is a container of one entry, 'embedding.weight'"),
    ("a layer too many", lambda w: load({"layers.3.weight": torch.zeros(2)}, w / "bare"), PlanError, "the checkpoint has no 'layers.3.weight'; there are 'layers.0' to 'layers.2'"),
    ("a layer too many, in a part", lambda w: dcp_rs.open(w / "model")["model.layers.7.attn.weight"], EntryNotFoundError, "; there are 'model.layers.0' to 'model.layers.2'"),
    # the wrong object
    ("a module to save", lambda w: save(torch.nn.Linear(2, 2), w / "new"), TypeError, "Linear is not a state dict: pass {'model': model}, or model.state_dict()"),
    ("a module to load", lambda w: load(torch.nn.Linear(2, 2), w / "bare"), TypeError, "or model.state_dict()"),
    ("an optimizer", lambda w: save(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), w / "new"), TypeError, "SGD is not a state dict: pass {'optim': optim}"),
    ("a list", lambda w: save([torch.ones(1)], w / "new"), TypeError, "pass a dict of names to tensors"),
    ("parameters", lambda w: save(torch.nn.Linear(2, 2).parameters(), w / "new"), TypeError, "generator is not a state dict: pass a dict"),
    ("a tensor", lambda w: save(torch.ones(2), w / "new"), TypeError, "or to objects with state_dict() and load_state_dict()"),
    ("swapped", lambda w: load(str(w / "bare"), {}), TypeError, "the state dict comes first, then the path"),
    ("a planner, to load", lambda w: load({}, w / "bare", planner=RsLoadPlanner()), TypeError, "load() has no option 'planner': planners belong to torch's functions: dcp.load(state_dict, storage_reader=dcp_rs.RsReader(path), planner=...)"),
    ("a planner, to save", lambda w: save({}, w / "new", planner=RsSavePlanner()), TypeError, "save() has no option 'planner': planners belong to torch's functions: dcp.save(state_dict, storage_writer=dcp_rs.RsWriter(path), planner=...)"),
    ("a planner, in the background", lambda w: dcp_rs.async_save({}, w / "new", planner=RsSavePlanner(), no_dist=True), TypeError, "dcp.async_save(state_dict, storage_writer=dcp_rs.RsWriter(path), planner=...)"),
    ("a planner, to save a step", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).save(1, {}, planner=RsSavePlanner()), TypeError, "CheckpointManager.save() has no option 'planner': use include=, exclude= and dtype="),
    ("a reader for a path", lambda w: load({}, RsReader("ckpt")), TypeError, "a path is a str or a pathlib.Path, not RsReader: pass 'ckpt'"),
    ("a writer for a path", lambda w: save({}, RsWriter("ckpt")), TypeError, "a path is a str or a pathlib.Path, not RsWriter: pass 'ckpt'"),
    ("a reader, to open", lambda w: dcp_rs.open(RsReader("ckpt")), TypeError, "not RsReader: pass 'ckpt'"),
    ("a path for a reader", lambda w: dcp_rs.load_state_dict({}, "ckpt", no_dist=True), TypeError, "storage_reader= is a path: pass RsReader('ckpt'), or call dcp_rs.load(state_dict, path)"),
    ("a writer for a reader", lambda w: dcp_rs.load_state_dict({}, RsWriter("ckpt"), no_dist=True), TypeError, "takes a reader such as RsReader(path), not RsWriter"),
    ("no path", lambda w: dcp_rs.open(None), TypeError, "a path is a str or a pathlib.Path, not None"),
    ("a number for a path", lambda w: save({}, 3), TypeError, "a path is a str or a pathlib.Path, not int"),
    ("an empty path", lambda w: save({}, ""), ValueError, "the path is empty: for the current folder, pass '.'"),
    ("a backend for a process group", lambda w: dcp_rs.save({}, w / "new", process_group="gloo"), TypeError, "process_group= takes a group, as torch.distributed.new_group() returns, not str"),
    ("no copy", lambda w: dcp_rs.async_save({}, w / "new", max_copies=0, no_dist=True), ValueError, "max_copies=0: must be a positive integer"),
    ("a state dict and a step, swapped", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).save({}, 1), TypeError, "the step comes first, then the state dict"),
    ("a file before the tensors", lambda w: dcp_rs.save_file(w / "x.safetensors", {}), TypeError, "tensors is a PosixPath: pass a dict of tensors by name"),
    ("a module to a .safetensors file", lambda w: dcp_rs.save_file(torch.nn.Linear(2, 2), w / "new"), TypeError, "tensors is a Linear: pass a dict of tensors by name, such as model.state_dict()"),
    ("text for metadata", lambda w: dcp_rs.save_file({}, w / "new", metadata="pt"), TypeError, "metadata='pt': pass a dict of text by name, such as {'format': 'pt'}"),
    ("a model before the path", lambda w: dcp_rs.optim.save_training_state(torch.nn.Linear(2, 2), "new"), TypeError, "model is str: pass a torch.nn.Module"),
    ("a scheduler for extra", lambda w: dcp_rs.optim.training_state(torch.nn.Linear(2, 2), extra=dcp_rs.optim.RngState()), TypeError, "extra is of type RngState: pass a dict of entries by name, such as {'scheduler': scheduler}"),
    ("a list of extra files", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).save(1, {}, extra_files=["a"]), TypeError, "extra_files=['a']: pass a dict of bytes or paths by name"),
    ("a number for a name", lambda w: dcp_rs.open(w / "named")[0], TypeError, "a name is text, and 0 is of type int"),
    ("a list of names", lambda w: dcp_rs.open(w / "named").get_slice(["epoch"]), TypeError, "a name is text, and ['epoch'] is of type list"),
    ("a module for a configuration", lambda w: dcp_rs.views_for(3), TypeError, "config is of type int: pass model.config, its dict, or a folder"),
    ("a number for views", lambda w: RsReader(w / "bare", views=3), TypeError, "views=3: pass a Stack, Concat, Unstack, Split or Transpose, or several"),
    ("a number for a manager's group", lambda w: dcp_rs.CheckpointManager(w / "new", process_group=3), TypeError, "process_group= takes a group, as torch.distributed.new_group() returns, not int"),
    # the wrong path
    ("a typo in a path", lambda w: dcp_rs.open(w / "moddel"), CheckpointNotFoundError, "did you mean"),
    ("a folder above steps", lambda w: dcp_rs.open(w / "run"), CheckpointNotFoundError, "it contains checkpoints: 'step-10', 'step-9', 'step-2'; open"),
    ("a folder above, to load", lambda w: load(prefixed(""), w / "run"), CheckpointNotFoundError, "it contains checkpoints: 'step-10'"),
    ("a folder of several models", lambda w: dcp_rs.open(w / "pipeline"), CheckpointNotFoundError, "it contains checkpoints: 'vae', 'unet'; open"),
    ("a text file", lambda w: dcp_rs.open(w / "notes.txt"), CheckpointNotFoundError, "notes.txt: a single file must be a .safetensors file, a file of torch.save, or an .index.json of such files"),
    ("a URL with one slash", lambda w: dcp_rs.open("s3:/bucket/step-10"), UnsupportedError, "a URL has two slashes after the colon: s3://bucket/step-10"),
    ("a URL with one slash, to save to", lambda w: save({}, "s3:/bucket/step-10"), UnsupportedError, "a URL has two slashes after the colon: s3://bucket/step-10"),
    ("a URL as a Path", lambda w: dcp_rs.open(Path("s3://bucket/step-10")), UnsupportedError, "pass a URL as text: pathlib.Path removes one of its two slashes"),
    ("a folder that cannot be made", lambda w: save({}, "/proc/none/new"), FileNotFoundError, "[Errno 2] cannot create: No such file or directory: '/proc/none'"),
    ("a checkpoint that is to stay", lambda w: save({}, w / "bare", overwrite=False), CheckpointExistsError, "bare, and overwrite=False: pass overwrite=True, or another path"),
    ("a hub id", lambda w: dcp_rs.open("meta-llama/Llama-3.1-8B"), CheckpointNotFoundError, "huggingface_hub.snapshot_download('meta-llama/Llama-3.1-8B')"),
    ("a data file of torch's", lambda w: dcp_rs.open(w / "stock" / "__0_0.distcp"), CheckpointNotFoundError, "it is a data file of the checkpoint"),
    ("the only tensor of one of torch's", lambda w: dcp_rs.open(w / "single" / "__0_0.distcp"), CheckpointNotFoundError, "single: open that folder"),
    ("a data file of torch's, alone", lambda w: dcp_rs.open(w / "alone" / "__0_0.distcp"), CheckpointNotFoundError, "open its folder, which needs the .metadata file of the save"),
    ("a folder that is not there", lambda w: dcp_rs.open(w / "runs" / "today" / "step-10"), CheckpointNotFoundError, "has no 'runs'"),
    ("a file, to save to", lambda w: save(MODEL, w / "model.pt"), CheckpointExistsError, "model.pt is a file ("),
    ("a file, to save below", lambda w: save(MODEL, w / "model.pt" / "step-10"), NotADirectoryError, "where a folder has to be"),
    ("a file, to save to in the background", lambda w: dcp_rs.async_save(MODEL, w / "model.pt", no_dist=True).result(), CheckpointExistsError, "model.pt is a file ("),
    ("a link to nothing, to save to", lambda w: save(MODEL, w / "dangling"), CheckpointExistsError, "dangling is a dangling link to"),
    ("a file for a run", lambda w: dcp_rs.CheckpointManager(w / "model.pt", no_dist=True).save(1, MODEL), CheckpointExistsError, "model.pt is a file"),
    ("a web server, to save to", lambda w: save({}, "https://host/step-10"), UnsupportedError, "a web server is read only"),
    ("another store", lambda w: dcp_rs.open("hdfs://name/step-10"), UnsupportedError, "s3://, gs://, az://, http:// or https://"),
    ("Google's other scheme", lambda w: dcp_rs.open("gcs://bucket/step-10"), UnsupportedError, "gcs:// is not supported: use gs://"),
    ("Azure's scheme", lambda w: dcp_rs.open("abfss://c@account.dfs.core.windows.net/x"), UnsupportedError, "abfss:// is not supported: use az://CONTAINER/"),
    ("the Hub's scheme", lambda w: dcp_rs.open("hf://org/model"), UnsupportedError, "hf:// is not supported: the Hub is not read: pass the path that huggingface_hub.snapshot_download() returns"),
    ("fsspec's anon", lambda w: dcp_rs.open("s3://bucket/x", anon=True), TypeError, "open() has no option 'anon': storage_options={'skip_signature': True} sends no credentials"),
    ("fsspec's anon, as an option of a store", lambda w: load({}, "s3://bucket/x", storage_options={"anon": True}), UnsupportedError, "storage_options has no 'anon': use skip_signature="),
    ("fsspec's secret", lambda w: RsReader("s3://bucket/x", storage_options={"secret": "x"}), UnsupportedError, "storage_options has no 'secret': use aws_secret_access_key="),
    # the wrong option
    ("an option of load", lambda w: load({}, w / "bare", verfy=True), TypeError, "load() has no option 'verfy': did you mean 'verify'?"),
    ("an option of save", lambda w: save({}, w / "new", fsnyc=False), TypeError, "save() has no option 'fsnyc': did you mean 'fsync'?"),
    ("an option of async_save", lambda w: dcp_rs.async_save({}, w / "new", overwite=True), TypeError, "did you mean 'overwrite'?"),
    ("an option of open", lambda w: dcp_rs.open(w / "bare", devce="cpu"), TypeError, "open() has no option 'devce': did you mean 'device'?"),
    ("overwrite= of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", overwrite=True), TypeError, "CheckpointManager has no option 'overwrite': save(step, state_dict, force=True) replaces a step"),
    ("parent= of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", parent=w / "bare"), TypeError, "reuse= takes unchanged tensors"),
    ("save_id= of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", save_id="0" * 32), TypeError, "each step gets a new one"),
    ("a policy of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", keep_lst=2), TypeError, "CheckpointManager has no option 'keep_lst': did you mean 'keep_last'?"),
    ("a value of an option", lambda w: dcp_rs.open(w / "bare", io="mmapped"), ValueError, "one of 'auto', 'mmap'"),
    ("a function", lambda w: dcp_rs.opne, AttributeError, "did you mean 'open'?"),  # type: ignore[attr-defined]
    ("torch's map_location", lambda w: load({}, w / "bare", map_location="cpu"), TypeError, "has no option 'map_location': use device="),
    ("a load without a state dict", lambda w: dcp_rs.load(w / "bare"), TypeError, "dcp_rs.load(state_dict, path) fills a state dict; dcp_rs.open(path) reads tensors by name"),
    ("torch's load_state_dict, with a path", lambda w: dcp_rs.load_state_dict(w / "bare"), TypeError, "dcp_rs.open(path) reads tensors by name"),
    ("torch's storage_reader", lambda w: dcp_rs.load({}, storage_reader=RsReader(w / "bare")), TypeError, "load() has no option 'storage_reader': path= takes its path; dcp_rs.load_state_dict() takes a reader"),
    ("torch's storage_writer", lambda w: dcp_rs.save({}, storage_writer=RsWriter(w / "new")), TypeError, "path= takes its path; torch's dcp.save() takes a writer"),
    ("torch's storage_writer, and a path", lambda w: dcp_rs.async_save({}, w / "new", storage_writer=RsWriter(w / "new")), TypeError, "path= takes its path"),
    ("an option of a reader", lambda w: RsReader(w / "bare", thread=2), TypeError, "RsReader has no option 'thread': did you mean 'threads'?"),
    ("an option of a writer", lambda w: RsWriter(w / "new", threds=2), TypeError, "RsWriter has no option 'threds': did you mean 'threads'?"),
    ("a dtype for a writer", lambda w: RsWriter(w / "new", dtype="bf16"), TypeError, "dcp_rs.load(), dcp_rs.save() and the planners take it"),
    ("strict= of a planner", lambda w: RsLoadPlanner(strict=False), TypeError, "allow_partial_load=True does what strict=False does elsewhere"),
    ("a prefix of an option", lambda w: RsSavePlanner(excl="*"), TypeError, "RsSavePlanner has no option 'excl'"),
    ("an option like another one", lambda w: dcp_rs.CheckpointManager(w / "new", max_kept=3), TypeError, "has no option 'max_kept'"),
    ("strict= of a manager's load", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).load({}, strict=False), TypeError, "CheckpointManager.load() has no option 'strict': allow_partial_load=True does"),
    ("strict= of a manager's training load", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).load_training_state(torch.nn.Linear(2, 2), strict=False), TypeError, "partial=True does what strict=False does elsewhere"),
    ("the step of a manager's load first", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).load(1, {}), TypeError, "the state dict comes first, then the step"),
    ("text for a step", lambda w: dcp_rs.CheckpointManager(w / "run", no_dist=True).load({}, "1"), ValueError, "step='1': must be an integer from 0 on"),
    ("Orbax's restore", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).restore(1), AttributeError, "CheckpointManager has no attribute 'restore': use load"),
    ("a method of other readers", lambda w: dcp_rs.open(w / "named").names(), AttributeError, "Checkpoint has no attribute 'names': use keys"),
    ("the wait of torch's futures", lambda w: dcp_rs.SaveFuture().wait(), AttributeError, "SaveFuture has no attribute 'wait': use result"),
    ("a converter of torch", lambda w: dcp_rs.dcp_to_torch_save, AttributeError, "dcp_rs.convert(path, out, to='torch') writes such a file"),  # type: ignore[attr-defined]
    ("a misspelt method", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).lastest_step(), AttributeError, "did you mean 'latest_step'?"),
    ("a scheduler for a training save", lambda w: dcp_rs.optim.save_training_state(w / "new", torch.nn.Linear(2, 2), scheduler=None, no_dist=True), TypeError, "save_training_state() has no option 'scheduler': extra={'scheduler': scheduler, 'step': step} takes"),
    ("a class of torch", lambda w: dcp_rs.FileSystemReader, AttributeError, "use RsReader"),  # type: ignore[attr-defined]
    ("a function of dcp_rs.optim", lambda w: dcp_rs.save_training_state, AttributeError, "it is dcp_rs.optim.save_training_state"),  # type: ignore[attr-defined]
    ("an exception", lambda w: dcp_rs.PlanError, AttributeError, "it is dcp_rs.errors.PlanError"),  # type: ignore[attr-defined]
    # the wrong type
    ("a dtype that is none", lambda w: load(prefixed(""), w / "bare", dtype="bf17"), ValueError, "dtype='bf17': must be one of float64, float32, float16, bfloat16"),
    ("an integer dtype", lambda w: save(MODEL, w / "new", dtype=torch.int8), ValueError, "dtype=torch.int8: must be one of float64"),
    ("a list for rename", lambda w: load(prefixed(""), w / "bare", rename=["model"]), TypeError, "rename=['model']: pass a mapping such as {'module': ''}, or a function of a name"),
    ("a prefix for rename", lambda w: load(prefixed(""), w / "bare", rename="model."), TypeError, "rename='model.': pass a mapping"),
    ("rename to nothing", lambda w: load(prefixed(""), w / "bare", rename={"model": None}), TypeError, "rename={'model': None}: pass a mapping"),
    ("rename of a conversion", lambda w: dcp_rs.convert(w / "bare", w / "new", rename=["a"]), TypeError, "rename=['a']: pass a mapping"),
    ("rename of a training load", lambda w: dcp_rs.optim.load_training_state(w / "bare", torch.nn.Linear(2, 2), rename=["a"], no_dist=True), TypeError, "rename=['a']: pass a mapping"),
    ("a function for globs", lambda w: load(prefixed(""), w / "bare", include=len), TypeError, "globs over names, such as 'model.*', not by <built-in function len>"),
    ("a number among globs", lambda w: save(MODEL, w / "new", exclude=[3]), TypeError, "globs over names, such as 'model.*', not by 3"),
    ("text for progress", lambda w: load(prefixed(""), w / "bare", progress="yes"), TypeError, "progress='yes': pass True, or a function of two numbers"),
    ("a device that is none", lambda w: load(prefixed(""), w / "bare", device="gpu"), ValueError, "device='gpu': must be a device of torch, such as 'cpu', 'cuda' or 'cuda:0'"),
    ("a device that is not there", lambda w: load(prefixed(""), w / "bare", device="cuda:99"), ValueError, "Check the driver, CUDA_VISIBLE_DEVICES, and that torch is built for it"),
    ("a device that is not there, to open on", lambda w: dcp_rs.open(w / "bare", device="xpu:99"), ValueError, "device='xpu:99': torch"),
    ("a dtype for a device", lambda w: dcp_rs.open(w / "bare", device=torch.float32), ValueError, "device=torch.float32: must be a device of torch"),
    ("a device of a planner", lambda w: RsLoadPlanner(device="gpu"), ValueError, "device='gpu': must be a device"),
    ("a device of a file", lambda w: dcp_rs.load_file(w / "x.safetensors", device="gpu"), ValueError, "device='gpu': must be a device"),
    ("a device of a stream", lambda w: dcp_rs.open(w / "bare").stream("model.*"), ValueError, "device='model.*': must be a device"),
    ("text for a partial load", lambda w: load(prefixed(""), w / "bare", allow_partial_load="model"), ValueError, "allow_partial_load='model': must be one of True, False"),
    ("text for assign", lambda w: load(prefixed(""), w / "bare", assign="no"), ValueError, "assign='no': must be one of True, False"),
    ("text for weights_only", lambda w: dcp_rs.open(w / "bare", weights_only="no"), ValueError, "weights_only='no': must be one of True, False"),
    ("text for an age", lambda w: dcp_rs.clean(w / "bare", older_than="1d"), ValueError, "older_than='1d': seconds, not negative"),
    ("a number for globs of a planner", lambda w: RsSavePlanner(include=3), TypeError, "globs over names, such as 'model.*', not by 3"),
    ("text for a switch", lambda w: save(MODEL, w / "new", overwrite="no"), ValueError, "overwrite='no': must be one of True, False"),
    ("a number for metrics", lambda w: dcp_rs.CheckpointManager(w / "run", no_dist=True).save(1, {}, metrics=0.5), TypeError, "metrics=0.5: pass a dict of numbers by name"),
    ("text for a time", lambda w: dcp_rs.CheckpointManager(w / "new", keep_within="1h"), ValueError, "keep_within='1h': must be a positive time, as a timedelta or in seconds"),
    ("the name of a signal", lambda w: dcp_rs.CheckpointManager(w / "new", preemption="SIGTERM"), ValueError, "preemption='SIGTERM': pass a signal such as signal.SIGTERM, or a function"),
    ("a number for the name of a step", lambda w: dcp_rs.latest(w / "run", step_name=3), ValueError, "step_name=3: pass the name of a folder"),
    ("an option of convert", lambda w: dcp_rs.convert(w / "bare", w / "new", formt="dcp"), TypeError, "convert() has no option 'formt'"),
    ("an option of verify", lambda w: dcp_rs.verify(w / "bare", thread=2), TypeError, "verify() has no option 'thread': did you mean 'threads'?"),
    ("an option of a manager's save", lambda w: dcp_rs.CheckpointManager(w / "run").save(1, {}, forced=True), TypeError, "CheckpointManager.save() has no option 'forced': did you mean 'force'?"),
    ("an option of a training load", lambda w: dcp_rs.optim.load_training_state(w / "bare", torch.nn.Linear(2, 2), verfy=True, no_dist=True), TypeError, "load_training_state() has no option 'verfy': did you mean 'verify'?"),
    ("an option of a load of an optimizer", lambda w: dcp_rs.optim.load_optim_state_dict(w / "bare", module := torch.nn.Linear(2, 2), torch.optim.SGD(module.parameters()), partal=True), TypeError, "load_optim_state_dict() has no option 'partal': did you mean 'partial'?"),
    ("a training load without a model", lambda w: dcp_rs.optim.load_training_state(w / "bare", io="mmap"), TypeError, "missing 1 required positional argument: 'model'"),
    ("a number for the function that keeps", lambda w: dcp_rs.CheckpointManager(w / "new", keep=3), TypeError, "keep=3: pass a function of a step's number and metrics"),
    ("a name for the function of a saved step", lambda w: dcp_rs.CheckpointManager(w / "new", on_saved="evaluate"), TypeError, "on_saved='evaluate': pass a function of a step's path"),
    ("a plain value of each rank", lambda w: dcp_rs.optim.PerRank({"at": 3}), TypeError, "PerRank takes an object with state_dict() and load_state_dict(), not dict"),
    ("a data loader without a state", lambda w: dcp_rs.optim.PerRank(torch.utils.data.DataLoader([1])), TypeError, "not DataLoader"),
    ("no metric for the best", lambda w: dcp_rs.CheckpointManager(w / "new", keep_best=2), ValueError, "keep_best= needs metric=, the name of the metric to compare"),
    # what does not fit
    ("another shape", lambda w: load({"layers.0.weight": torch.zeros(3)}, w / "bare"), PlanError, "tensor 'layers.0.weight' has shape (3,) in the state dict, and (2,) in the checkpoint"),
    ("a number for a tensor", lambda w: load({"layers.0.weight": 1}, w / "bare"), PlanError, "'layers.0.weight' is a tensor in the checkpoint, and"),
    ("a slice of a value", lambda w: dcp_rs.open(w / "named").get_slice("epoch"), TypeError, "'epoch' is not a tensor: checkpoint['epoch'] reads the value"),
    ("a value as a tensor", lambda w: dcp_rs.open(w / "named").get_tensor("epoch"), TypeError, "'epoch' is not a tensor: checkpoint['epoch'] reads the value"),
    ("a function in a state dict", lambda w: save({"f": lambda: 1}, w / "made"), UnsupportedError, "value 'f' (function) cannot be pickled"),
    ("a strided nested tensor", lambda w: save({"layer": {"n": nested()}}, w / "made"), UnsupportedError, "tensor 'layer.n' is a nested tensor of the strided layout"),
    ("a strided nested tensor, in the background", lambda w: dcp_rs.async_save({"n": nested()}, w / "made", no_dist=True).result(), UnsupportedError, "tensor 'n' is a nested tensor"),
    ("a strided nested tensor, to cast", lambda w: save({"n": nested()}, w / "made", dtype="bf16"), UnsupportedError, "tensor 'n' is a nested tensor"),
    ("a strided nested parameter", lambda w: save({"n": torch.nn.Parameter(nested())}, w / "made"), UnsupportedError, "tensor 'n' is a nested tensor"),
    ("a strided nested tensor in a .safetensors file", lambda w: dcp_rs.save_file({"n": nested()}, w / "empty" / "x.safetensors"), UnsupportedError, "safetensors cannot hold 'n': it has no shape"),
    ("a strided nested tensor, to load into", lambda w: load({"layers.0.weight": nested()}, w / "bare"), UnsupportedError, "tensor 'layers.0.weight' is a nested tensor of the strided layout, which has no shape: load into the tensors of its unbind()"),
    ("a strided nested tensor that is not stored", lambda w: load({"n": nested()}, w / "bare"), UnsupportedError, "tensor 'n' is a nested tensor"),
    ("a strided nested tensor, to replace", lambda w: load({"layers.0.weight": nested()}, w / "bare", dtype="bf16", assign=True), UnsupportedError, "is a nested tensor"),
    ("a strided nested tensor, through a reader", lambda w: dcp_rs.load_state_dict({"layers.0.weight": nested()}, RsReader(w / "bare"), no_dist=True), UnsupportedError, "is a nested tensor"),
    ("a strided nested tensor among extra entries", lambda w: dcp_rs.optim.load_training_state(w / "training", torch.nn.Linear(2, 2), extra={"n": nested()}, no_dist=True), UnsupportedError, "tensor 'extra.n' is a nested tensor"),
    ("a lazy parameter to load into", lambda w: load({"layers.0.weight": torch.nn.UninitializedParameter()}, w / "bare"), UnsupportedError, "tensor 'layers.0.weight' has no shape yet: run a forward pass of its lazy module first"),
    ("a dict that contains itself", lambda w: save(cyclic({"w": torch.ones(1)}), w / "made"), PlanError, "the state dict contains itself, or is nested too deep: look at ['self']['self']"),
    ("a list that contains itself", lambda w: save({"a": cyclic([torch.ones(1)])}, w / "made"), PlanError, "the state dict contains itself"),
    ("a dict that contains itself, to load into", lambda w: load(cyclic({}), w / "bare"), PlanError, "the state dict contains itself"),
    ("a tensor without data", lambda w: save({"t": torch.empty(1, device="meta")}, w / "made"), UnsupportedError, "'t'"),
    ("a nested dict in a .safetensors file", lambda w: dcp_rs.save_file({"a": {"b": torch.ones(1)}}, w / "empty" / "x.safetensors"), UnsupportedError, "safetensors cannot hold 'a': it is a dict"),
    ("values in a .safetensors file", lambda w: dcp_rs.convert(w / "named", w / "new", to="safetensors"), UnsupportedError, "safetensors cannot hold 1 of 2 entries: 'epoch' is not a tensor. skip_unsupported=True leaves them out"),
    ("a conversion onto itself", lambda w: dcp_rs.convert(w / "bare", w / "bare", overwrite=True), ValueError, "is the source, contains it, or lies in it"),
    ("a format's other name", lambda w: dcp_rs.convert(w / "bare", w / "new", to="pt"), ValueError, "to='pt': must be one of 'dcp-rs', 'dcp', 'safetensors', 'torch'"),
    ("a step that is not there", lambda w: dcp_rs.CheckpointManager(w / "run", no_dist=True).load({}, 7), CheckpointNotFoundError, "there is no step 7 in"),
    # what a newcomer tried
    ("a generator of pairs", lambda w: save(((n, p) for n, p in torch.nn.Linear(2, 2).named_parameters()), w / "new"), TypeError, "generator is not a state dict: pass a dict of names to tensors"),
    ("the items of a state dict", lambda w: save(torch.nn.Linear(2, 2).state_dict().items(), w / "new"), TypeError, "odict_items is not a state dict: pass a dict"),
    ("parameters within a state dict", lambda w: save({"model": torch.nn.Linear(2, 2).parameters()}, w / "made"), UnsupportedError, "Save a dict or a list of what the generator yields, such as model.state_dict()"),
    ("state_dict without its call", lambda w: save(torch.nn.Linear(2, 2).state_dict, w / "new"), TypeError, "state_dict is a method: call it, as in model.state_dict()"),
    ("a checkpoint, to load into", lambda w: load(dcp_rs.open(w / "bare"), w / "bare"), TypeError, "a Checkpoint is read only: pass a dict of tensors to fill"),
    ("a checkpoint, to load into through a reader", lambda w: dcp_rs.load_state_dict(dcp_rs.open(w / "bare"), RsReader(w / "bare"), no_dist=True), TypeError, "a Checkpoint is read only"),
    ("a checkpoint for a path", lambda w: load({}, dcp_rs.open(w / "bare")), TypeError, "a path is a str or a pathlib.Path, not Checkpoint: pass '"),
    ("a path and a state dict, swapped in the background", lambda w: dcp_rs.async_save(w / "new", {}, no_dist=True), TypeError, "the state dict comes first, then the path"),
    ("an open file for a path", lambda w: load({}, (w / "notes.txt").open()), TypeError, "a path is a str or a pathlib.Path, not TextIOWrapper"),
    ("torch.load's device, by position", lambda w: dcp_rs.load(str(w / "model.pt"), "cpu"), TypeError, "the state dict comes first, then the path"),
    ("a mode of open, by position", lambda w: dcp_rs.open(w / "bare", "rb"), ValueError, "framework='rb': must be one of 'pt'"),
    ("a mode of open", lambda w: dcp_rs.open(w / "bare", mode="r"), TypeError, "open() has no option 'mode': a checkpoint opens for reading only: leave it out"),
    ("a framework that is not read", lambda w: dcp_rs.open(w / "bare", framework="jax"), ValueError, "framework='jax': must be one of 'pt'"),
    ("text for a slice", lambda w: dcp_rs.open(w / "bare").get_slice("layers.0.weight")["0:1"], TypeError, "indices are integers, slices and '...', not str"),  # type: ignore[index]
    ("a checkpoint to a device", lambda w: dcp_rs.open(w / "bare").to("cuda"), AttributeError, "Checkpoint has no attribute 'to': dcp_rs.open(path, device=...) opens it on a device"),
    ("a checkpoint's save", lambda w: dcp_rs.open(w / "bare").save("x"), AttributeError, "dcp_rs.convert(path, out) writes a checkpoint"),
    ("a checkpoint's load_state_dict", lambda w: dcp_rs.open(w / "bare").load_state_dict({}), AttributeError, "dcp_rs.load(state_dict, path) fills a state dict"),
    ("torch's staging_completion", lambda w: dcp_rs.SaveFuture().staging_completion, AttributeError, "use staged"),
    ("torch's upload_completion", lambda w: dcp_rs.SaveFuture().upload_completion, AttributeError, "use result"),
    ("the get of other futures", lambda w: dcp_rs.SaveFuture().get(), AttributeError, "use result"),
    ("the join of a thread", lambda w: dcp_rs.SaveFuture().join(), AttributeError, "use result"),
    ("a state dict for a model", lambda w: dcp_rs.optim.load_training_state(w / "training", torch.nn.Linear(2, 2).state_dict(), no_dist=True), TypeError, "model is OrderedDict: pass a torch.nn.Module"),
    ("a state dict for an optimizer", lambda w: dcp_rs.optim.load_training_state(w / "training", torch.nn.Linear(2, 2), {"state": {}}, no_dist=True), TypeError, "an optimizer is dict: pass a torch.optim.Optimizer"),
    ("the class of an optimizer", lambda w: dcp_rs.optim.load_training_state(w / "training", torch.nn.Linear(2, 2), torch.optim.SGD, no_dist=True), TypeError, "an optimizer is the class SGD: pass a torch.optim.Optimizer"),
    ("the class of a model", lambda w: dcp_rs.optim.save_training_state(w / "new", torch.nn.Linear, no_dist=True), TypeError, "model is the class Linear: pass a torch.nn.Module"),
    ("a scheduler after the optimizer", lambda w: dcp_rs.optim.save_training_state(w / "new", torch.nn.Linear(2, 2), None, dcp_rs.optim.RngState(), no_dist=True), TypeError, "extra is of type RngState: pass a dict of entries by name"),
    ("a step after the optimizer", lambda w: dcp_rs.optim.save_training_state(w / "new", torch.nn.Linear(2, 2), None, 3, no_dist=True), TypeError, "extra is of type int: pass a dict of entries by name"),
    ("a class among extra entries", lambda w: dcp_rs.optim.save_training_state(w / "new", torch.nn.Linear(2, 2), None, {"rng": dcp_rs.optim.RngState}, no_dist=True), TypeError, "extra has the class RngState: pass an instance of it"),
    ("a part that is none", lambda w: dcp_rs.optim.load_training_state(w / "training", torch.nn.Linear(2, 2), partial={"optim"}, no_dist=True), TypeError, "partial= has 'optim', and takes model, optimizer, extra"),
    ("a step without its number", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).save({}), TypeError, "missing 1 required positional argument: 'state_dict': manager.save(step, state_dict) saves a step"),
    ("a question without a step", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).should_save(), TypeError, "missing 1 required positional argument: 'step': pass the number of the step"),
    ("a folder for a step", lambda w: dcp_rs.CheckpointManager(w / "run", no_dist=True).delete("step-9"), ValueError, "step='step-9': must be an integer from 0 on"),
    ("a printf format for the name of a step", lambda w: dcp_rs.CheckpointManager(w / "new", step_name="step-%d"), ValueError, "step_name='step-%d': pass the name of a folder, with {} for the number"),
    ("a truth value for preemption", lambda w: dcp_rs.CheckpointManager(w / "new", preemption=True), ValueError, "preemption=True: pass a signal such as signal.SIGTERM, or a function"),
    ("text for a number of bytes", lambda w: dcp_rs.CheckpointManager(w / "new", max_bytes="2TB"), ValueError, "max_bytes='2TB': must be a positive integer"),
    ("the training save of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).save_training_state(1, None), AttributeError, "save(step, training_state(model, optimizer, extra)) saves a training job"),
    ("the latest checkpoint of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).latest_checkpoint, AttributeError, "use latest_step"),
    ("the best of a manager", lambda w: dcp_rs.CheckpointManager(w / "new", no_dist=True).best(), AttributeError, "use best_step"),
    ("a step of a save", lambda w: save({}, w / "new", step=3), TypeError, "save() has no option 'step': CheckpointManager(root).save(step, state_dict) saves steps"),
    ("a checkpoint itself for a run", lambda w: dcp_rs.CheckpointManager(w / "bare", no_dist=True).load({}), CheckpointNotFoundError, "bare is a checkpoint itself, and no folder of steps: pass the folder above it"),
    ("one checkpoint to average", lambda w: dcp_rs.merge(w / "bare", w / "new"), ValueError, "bare': pass a list, as in merge(['a', 'b'], 'out')"),
    ("checkpoints to average, not in a list", lambda w: dcp_rs.merge(w / "bare", w / "model", w / "new"), TypeError, "the checkpoints are one list, as in dcp_rs.merge(['a', 'b'], 'out')"),
    ("a number for weights", lambda w: dcp_rs.merge([w / "bare", w / "bare"], w / "new", weights=0.5), TypeError, "weights=0.5: pass a list, with a number for each input"),
    ("nothing to average", lambda w: dcp_rs.merge([], w / "new"), ValueError, "inputs=[]: pass at least one checkpoint"),
    ("a conversion without a result", lambda w: dcp_rs.convert(w / "bare"), TypeError, "'out': dcp_rs.convert(path, out) reads path and writes out"),
    ("text for a removal", lambda w: dcp_rs.clean(w / "bare", yes="no"), ValueError, "yes='no': must be one of True, False"),
    ("a number for tiers", lambda w: load({}, w / "bare", tiers=3), TypeError, "tiers=3: pass a list of folders"),
    ("a path to reuse", lambda w: save({}, w / "made", reuse=w / "bare", parent=w / "bare"), TypeError, "globs over names, such as 'model.*', not by PosixPath('"),
    ("a number in metadata", lambda w: dcp_rs.save_file({}, w / "new", metadata={"step": 1}), TypeError, "metadata={'step': 1}: pass a dict of text by name"),
    ("a name for a configuration", lambda w: dcp_rs.views_for("llama"), FileNotFoundError, "config='llama': no such folder; pass model.config, or its dict"),
    ("a dtype to decode to", lambda w: dcp_rs.open(w / "bare", dequantize="fp8"), ValueError, "dequantize='fp8': pass True, or one of torch.bfloat16"),
    ("a command as a function", lambda w: dcp_rs.ls(w / "bare"), AttributeError, "it is a command in the terminal: see dcp-rs --help"),  # type: ignore[attr-defined]
    ("Orbax's checkpointer", lambda w: dcp_rs.AsyncCheckpointer(), AttributeError, "use async_save"),  # type: ignore[attr-defined]
    ("another library's load_checkpoint", lambda w: dcp_rs.load_checkpoint(w / "bare"), AttributeError, "use load"),  # type: ignore[attr-defined]
    ("an endpoint without a scheme", lambda w: dcp_rs.open("s3://bucket/x", storage_options={"aws_endpoint": "minio:9000"}), UnsupportedError, "aws_endpoint=minio:9000: an endpoint begins with https:// or http://"),
    ("a file in the place of a folder above", lambda w: save(MODEL, w / "notes.txt" / "a" / "b"), NotADirectoryError, "[Errno 20] there is a file (7 B) where a folder has to be: pass another path, or move it away: '"),
    ("a typo in a scheme", lambda w: dcp_rs.exists("htps://host/x"), UnsupportedError, "htps:// is not supported: use a path of the file system, file://"),
    # the command line
    ("a name to inspect", lambda w: command("inspect", w / "named", "epohc"), SystemExit, "did you mean 'epoch'?"),
    ("a command", lambda w: command("verfy", w / "bare"), SystemExit, "there is no command 'verfy': did you mean 'verify'?"),
    ("a folder above, to draw", lambda w: command("tree", w / "run"), SystemExit, "it contains checkpoints: 'step-10'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def heard():
    """Collects the messages, and prints them as a table: pytest tests/test_mistakes.py -s."""
    rows: list[tuple[str, str, str]] = []
    yield rows
    for what, error, said in rows:
        print(f"{what:44} {error:24} {said}")


@pytest.mark.parametrize(
    ("what", "make", "error", "words"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES]
)
def test_the_message_says_what_to_do(what, make, error, words, world, heard, monkeypatch, capfd):
    monkeypatch.chdir(world / "empty")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(error) as raised:
        make(world)
    assert raised.type is error
    said = capfd.readouterr().err.strip() if error is SystemExit else str(raised.value)
    heard.append((what, error.__name__, said.replace(str(world), "...")))
    assert words in said
    assert "\n" not in said
    assert not (world / "new").exists()


def test_there_are_enough():
    assert len(MISTAKES) >= 60


def test_an_endpoint_in_the_environment_is_checked(monkeypatch):
    """The client of the store panicked, and the message asked to report a bug."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(UnsupportedError, match=r"^AWS_ENDPOINT_URL=localhost:9000: an endpoint"):
        dcp_rs.open("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "me:secret@host:9000")
    with pytest.raises(UnsupportedError, match=r"^AWS_ENDPOINT_URL: an endpoint begins with"):
        dcp_rs.exists("s3://bucket/x")


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://",
        "http://:80",
        "http://[",
        "http://host:99999",
        "http://host:port",
        "http://host\n",
        " http://host",
        "http://a host",
        "http://host/{x}",
        "http://me:secret/more@host",
    ],
)
def test_an_endpoint_that_is_no_url(endpoint):
    """The client of the store panicked, and ``exists`` took that for a damaged checkpoint."""
    with pytest.raises(UnsupportedError, match=r"(?s)^aws_endpoint.*: an endpoint") as caught:
        dcp_rs.exists("s3://bucket/x", storage_options={"aws_endpoint": endpoint})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["aws_access_key_id", "aws_session_token", "aws_region"])
@pytest.mark.parametrize("end", ["\n", "\r", "\0"])
def test_a_credential_with_a_line_end_is_named(monkeypatch, name, end):
    """A key that was read from a file ends with one: the client of the store panicked."""
    options = {"aws_region": "r", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    with pytest.raises(UnsupportedError, match=f"^{name}: remove the line end") as caught:
        dcp_rs.open("s3://bucket/x", storage_options={**options, name: f"hidden{end}"})
    assert "hidden" not in str(caught.value)
    if end != "\0":
        monkeypatch.setenv(name.upper(), f"hidden{end}")
        with pytest.raises(UnsupportedError, match=f"^{name.upper()}: remove the line end"):
            dcp_rs.exists("s3://bucket/x")


def test_a_method_among_values_is_named(tmp_path):
    """It was saved as a pickle of the whole module, which does not load."""
    with pytest.warns(UserWarning, match=r"call it, as in model\.state_dict\(\)"):
        save({"model": torch.nn.Linear(2, 2).state_dict}, tmp_path / "saved")


PATHS = ("checkpoint_id", "f", "directory", "pretrained_model_name_or_path")
#: Options of other libraries, the functions that people pass them to, and the equivalents.
FOREIGN = [
    *((name, function, "path=") for name in PATHS for function in (dcp_rs.load, dcp_rs.save, dcp_rs.async_save, RsReader, RsWriter, dcp_rs.open, dcp_rs.verify, dcp_rs.exists, dcp_rs.convert, dcp_rs.clean, dcp_rs.index, dcp_rs.optim.load_training_state, dcp_rs.optim.save_training_state, dcp_rs.optim.load_optim_state_dict)),
    *((name, function, "root=") for name in ("path", "checkpoint_id", "directory", "dirpath", "output_dir", "folder") for function in (dcp_rs.CheckpointManager, dcp_rs.latest)),
    *((name, function, "filename=") for name in ("path", "f", "checkpoint_id") for function in (dcp_rs.load_file, dcp_rs.save_file)),
    *((name, dcp_rs.load_state_dict, "storage_reader=") for name in ("path", "checkpoint_id")),
    *(("map_location", function, "device=") for function in (dcp_rs.load, dcp_rs.open, dcp_rs.load_file, RsLoadPlanner)),
    *(("thread_count", function, "threads=") for function in (dcp_rs.load, dcp_rs.save, dcp_rs.async_save, dcp_rs.open)),
    ("sync_files", dcp_rs.save, "fsync="),
    ("use_pinned_memory", dcp_rs.async_save, "leave it out"),
    ("async_stager", dcp_rs.async_save, "async_staging="),
    ("torch_dtype", dcp_rs.load, "dtype="),
    ("tensors", dcp_rs.save, "state_dict="),
    ("state_dict", dcp_rs.save_file, "tensors="),
    ("optimizer", dcp_rs.optim.save_training_state, "optimizers="),
    ("optimizer", dcp_rs.optim.training_state, "optimizers="),
    ("format", dcp_rs.convert, "to="),
    ("dst", dcp_rs.convert, "out="),
    ("save_directory", dcp_rs.convert, "out="),
    ("force", dcp_rs.index, "overwrite="),
    *((name, dcp_rs.CheckpointManager, "keep_last=") for name in ("max_to_keep", "save_total_limit", "total_limit", "keep_latest_k")),
    *((name, dcp_rs.CheckpointManager, "save_every=") for name in ("save_interval_steps", "save_steps", "every_n_train_steps", "interval")),
    *((name, dcp_rs.CheckpointManager, "metric=") for name in ("monitor", "metric_for_best_model", "best_fn")),
    ("keep_period", dcp_rs.CheckpointManager, "keep_every="),
    ("keep_time_interval", dcp_rs.CheckpointManager, "keep_within="),
    ("should_keep_fn", dcp_rs.CheckpointManager, "keep="),
    ("save_top_k", dcp_rs.CheckpointManager, "keep_best="),
    ("best_mode", dcp_rs.CheckpointManager, "mode="),
    ("step_prefix", dcp_rs.CheckpointManager, "step_name="),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function", "own"), FOREIGN, ids=[f"{one[1].__name__}-{one[0]}" for one in FOREIGN]
)
def test_foreign_option_is_translated(name, function, own):
    """Max_to_keep= was answered by max_bytes=, and checkpoint_id= by a missing path."""
    with pytest.raises(TypeError) as raised:
        function(**{name: "x"})
    assert f"has no option {name!r}: " in str(raised.value)
    assert own in str(raised.value).partition(": ")[2]


def test_equivalents_are_options_that_there_are():
    """Each translation names an option of a public function, or is a sentence."""
    functions = [getattr(dcp_rs, name) for name in dcp_rs.__all__]
    functions += [getattr(dcp_rs.optim, name) for name in dcp_rs.optim.__all__]
    functions += [dcp_rs.open, dcp_rs.CheckpointManager.save]
    known = {*dcp_rs.__all__, *dir(dcp_rs.CheckpointManager), *_OPTIONS, "open", "preempted"}
    known |= COMMANDS.keys() | {*dir(dcp_rs.Checkpoint), *dir(dcp_rs.SaveFuture())}
    for function in filter(callable, functions):
        known |= inspect.signature(function).parameters.keys()
    texts = {text for texts in foreign().values() for text in texts}
    heads = {head for text in texts if (head := text.partition("=")[0]).isidentifier()}
    assert heads - {"storage_options"} <= known


def test_dtype_may_be_a_name(tmp_path):
    """It was an AttributeError in a load."""
    save(MODEL, tmp_path / "half", dtype="bf16")
    assert dcp_rs.open(tmp_path / "half")["layers.0.weight"].dtype == torch.bfloat16
    state = {name: torch.zeros(2, device="meta") for name in MODEL}
    load(state, tmp_path / "half", dtype="float32")
    assert all(torch.equal(value, torch.ones(2)) for value in state.values())
    for planner in (RsLoadPlanner(dtype="torch.float16"), RsSavePlanner(dtype="fp16")):
        assert planner.dtype == torch.float16


@pytest.mark.parametrize(
    ("prefix", "rename"),
    [("module.", {"": "module"}), ("other.", lambda name: f"other.{name}")],
)
def test_suggested_remedies_work(world, prefix, rename):
    state = prefixed(prefix)
    load(state, world / "bare", rename=rename)
    assert all(torch.equal(value, torch.ones(2)) for value in state.values())
    state = prefixed("")
    load(state, world / "model", rename={"model": ""})
    assert all(torch.equal(value, torch.ones(2)) for value in state.values())


def test_a_name_like_no_other_gets_no_advice(world):
    with pytest.raises(KeyError) as raised:
        dcp_rs.open(world / "bare")["zzz"]
    assert str(raised.value).endswith("/bare")
    with pytest.raises(dcp_rs.errors.CheckpointNotFoundError) as raised:
        dcp_rs.open(world / "empty")
    assert "did you mean" not in str(raised.value)


def test_the_nearest_of_many_is_found_at_once():
    names = [f"model.layers.{i}.experts.{j}.weight" for i in range(500) for j in range(200)]
    assert nearest("module.layers.7.experts.3.weight", names) == "model.layers.7.experts.3.weight"
    assert nearest("model.layers.7.expert.3.weight", names) is not None


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def startswith(self, *arguments):
        Counted.compared += 1
        return super().startswith(*arguments)


class CountedSet(set):
    """Names that count how often one is looked up."""

    def __contains__(self, name):
        Counted.compared += 1
        return super().__contains__(name)


@pytest.mark.parametrize(
    ("first", "others", "stored"),
    [("t_0.weight", "t_{}.weight", "table_{}.weight"), ("weight", "{}", "layers.{}.weight")],
)
def test_names_that_all_differ_are_compared_in_few_steps(first, others, stored):
    """10,000 of each kept a failed load busy for a minute."""
    wanted = [Counted(first), *(Counted(others.format(i)) for i in range(1, 1000))]
    known = CountedSet(stored.format(i) for i in range(1000))
    Counted.compared = 0
    assert "rename" not in explain_missing(wanted, wanted, known)
    assert Counted.compared < 200_000


def test_a_prefix_of_many_names_is_counted_over_all():
    wanted = [f"model.{i}" for i in range(300)]
    stored = {f"module.{i}" for i in range(300)}
    assert explain_missing(wanted, wanted, stored) == (
        "; its names begin with 'module.', not with 'model.': pass rename={'module': 'model'}"
    )
    wanted.append("other")
    assert "which finds 300 of 301 names" in explain_missing(wanted, wanted, stored)


def test_a_person_counts():
    assert sorted(["m.10.a", "m.2", "m.2.a", "m", "n"], key=natural) == [
        "m",
        "m.2",
        "m.2.a",
        "m.10.a",
        "n",
    ]
    long = "1" * 5000  # Python refuses to convert so many digits
    assert sorted([f"m.{long}", "m.02", "m.10"], key=natural) == ["m.02", "m.10", f"m.{long}"]
