"""Docstrings of what users call: they have Args, Returns and Example, and each example runs."""

import importlib
import inspect
import re
import shutil
import signal
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
import dcp_rs.optim
from support.places import ROOT

BLOCK = re.compile(r"^Example:\n    ```python\n(.*?)^    ```$", re.DOTALL | re.MULTILINE)
#: What functions return, or torch calls: its example is that of the function, or of the class.
MADE = (
    "CleanReport",
    "ConvertReport",
    "Leftover",
    "LoadReport",
    "MergeReport",
    "ReadReport",
    "SaveFuture",
    "SaveReport",
    "SavedMetadata",
    "VerifyReport",
)
PLUGINS = (
    "RsLoadPlanner",
    "RsReader",
    "RsSavePlanner",
    "RsWriter",
)


def public():
    """Every function and method that users call, by name."""
    for module, prefix in ((dcp_rs, ""), (dcp_rs.optim, "optim.")):
        for name in [*module.__all__, *(["open"] if module is dcp_rs else [])]:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield prefix + name, value
    for cls in (
        getattr(dcp_rs, name) for name in dcp_rs.__all__ if inspect.isclass(getattr(dcp_rs, name))
    ):
        for name, value in inspect.getmembers(cls, inspect.isfunction):
            if (
                not name.startswith("_")
                and value.__module__.startswith("dcp_rs")
                and not is_of_others(cls, name)
            ):
                yield f"{cls.__name__}.{name}", value
    for cls in (dcp_rs.optim.PerRank, dcp_rs.optim.RngState):
        for name in ("state_dict", "load_state_dict"):
            yield f"optim.{cls.__name__}.{name}", getattr(cls, name)


def is_of_others(cls, name):
    """Whether torch, or Python, says what a method is, and calls it: the class has the example."""
    return any(
        name in vars(base) for base in cls.__mro__[:-1] if not base.__module__.startswith("dcp_rs")
    )


FUNCTIONS = dict(public())
CLASSES = {name: getattr(dcp_rs, name) for name in (*PLUGINS, "Checkpoint", "CheckpointManager")}
CLASSES |= {
    name: getattr(dcp_rs, name) for name in ("Concat", "Split", "Stack", "Transpose", "Unstack")
}
CLASSES |= {"optim.RngState": dcp_rs.optim.RngState}


#: What a user's completion shows of each class: its own members, not those of torch, ``dict`` or
#: ``Future``. A member that only this package calls begins with an underscore.
SHOWN = {
    "Checkpoint": "chunks close get get_slice get_tensor get_tensors info metadata offset_keys path report save_id "
    "source state_dict stream",
    "CheckpointManager": "annotate async_save best_step close delete latest_step load load_training_state path root save "
    "should_save steps tiers wait",
    "CleanReport": "nbytes to_dict",
    "Concat": "dim",
    "ConvertReport": "bytes files seconds to_dict",
    "Leftover": "why_kept",
    "LoadReport": "bytes_direct bytes_mapped bytes_read bytes_verified bytes_wanted entries entries_loaded "
    "path replaced requests seconds to_dict",
    "MergeReport": "bytes files seconds to_dict",
    "ReadReport": "bytes_direct bytes_mapped bytes_read bytes_wanted path requests to_dict",
    "RsLoadPlanner": "create_global_plan create_local_plan finish_plan load_bytes resolve_tensor set_up_planner",
    "RsReader": "checkpoint_id path prepare_global_plan prepare_local_plan read_data read_metadata reset "
    "set_up_storage_reader source validate_checkpoint_id",
    "RsSavePlanner": "create_global_plan create_local_plan set_up_planner transform_object",
    "RsWriter": "checkpoint_id close finish options overwrite prepare_global_plan prepare_local_plan reset set_up_storage_writer stage "
    "storage_meta validate_checkpoint_id write_data",
    "SaveFuture": "cancel",
    "SaveReport": "bytes_reused bytes_written entries path requests seconds to_dict",
    "SavedMetadata": "report",
    "Split": "dim sizes",
    "Stack": "dim",
    "Transpose": "",
    "Unstack": "dim",
    "VerifyReport": "bytes_verified bytes_without_digest entries ok seconds to_dict",
    "optim.PerRank": "load_state_dict state_dict",
    "optim.RngState": "load_state_dict state_dict",
}


def shown(cls):
    """The public members that this package gives a class, and where each is."""
    for name in dir(cls):
        holder = next((base for base in cls.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and holder.__module__.startswith("dcp_rs"):
            yield name, holder


@pytest.mark.parametrize("name", SHOWN)
def test_a_class_shows_what_users_call(name):
    cls = (
        getattr(dcp_rs.optim, name.removeprefix("optim.")) if "." in name else getattr(dcp_rs, name)
    )
    assert sorted(member for member, _ in shown(cls)) == SHOWN[name].split()
    for member, holder in shown(cls):
        attributes = inspect.getdoc(holder).partition("Attributes:")[2]
        assert inspect.getdoc(getattr(cls, member)) or re.search(
            rf"^    (\w+, )*{member}(, \w+)*:", attributes, re.MULTILINE
        ), member


#: Classes of results that have no name in `dcp_rs`.
RESULTS = (
    "checkpoint.entries.ChunkInfo",
    "checkpoint.entries.TensorInfo",
    "checkpoint.open.TensorSlice",
    "checkpoint.verify.Problem",
    "engine.reports.Mismatch",
    "steps.step_store.SkippedStep",
    "steps.step_store.Step",
)


@pytest.mark.parametrize("name", [*SHOWN, *RESULTS])
def test_the_reference_shows_inherited_members(name):
    """`get_slice`, `info` and `to_dict` were on no page, nor were the classes of results."""
    module, _, attribute = f"dcp_rs.{name}".rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    entry = re.search(rf"^::: dcp_rs\.{re.escape(name)}$(\n    options: .*)?", pages, re.MULTILINE)
    assert entry
    inherits = any(holder is not cls for _, holder in shown(cls))
    assert inherits == ("inherited_members: true" in (entry[1] or ""))


def test_every_public_class_is_looked_at():
    assert {name for name in SHOWN if "." not in name} == {*CLASSES, *MADE} - {"optim.RngState"}


def sections(value):
    return set(
        re.findall(r"^(Args|Returns|Raises|Example):$", inspect.getdoc(value) or "", re.MULTILINE)
    )


def test_every_public_name_is_looked_at():
    classes = {name for name in dcp_rs.__all__ if inspect.isclass(getattr(dcp_rs, name))}
    assert classes == {*CLASSES, *MADE, "QuantizationError"} - {
        "optim.RngState"
    }  # errors have a page of their own
    assert len(FUNCTIONS) > 45


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_has_what_a_caller_needs(name):
    function = FUNCTIONS[name]
    signature, text = inspect.signature(function), inspect.getdoc(function)
    passed = [one for one in signature.parameters if one != "self" and not one.startswith("_")]
    assert not passed or "Args" in sections(function)
    for one in passed:
        assert re.search(rf"^    (\w+, )*{one}(, \w+)*: ", text, re.MULTILINE), (
            f"{name} does not explain {one}"
        )
    if str(signature.return_annotation) != "None":
        assert "Returns" in sections(function)
    # A title such as "Raises (on every rank):" is no section: the site shows it as a paragraph.
    assert not re.search(r"^(Raises|Args|Returns) \(", text, re.MULTILINE)


@pytest.mark.parametrize(
    "name", [*(name for name in FUNCTIONS if "." not in name), "CheckpointManager"]
)
def test_help_and_completion_show_each_option(name):
    signature = inspect.signature(getattr(dcp_rs, name))
    assert all(one.kind is not one.VAR_KEYWORD for one in signature.parameters.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What examples read."""
    folder = tmp_path_factory.mktemp("examples")
    state = {"model": torch.nn.Linear(2, 3).state_dict(), "step": 7}
    dcp_rs.save(state, folder / "ckpt", no_dist=True)
    dcp_rs.convert(
        folder / "ckpt",
        folder / "hf_model",
        to="safetensors",
        include="model.*",
        rename={"model": ""},
    )
    with dcp_rs.CheckpointManager(folder / "run", no_dist=True) as manager:
        manager.save(1, state, metrics={"loss": 0.5})
        manager.save(2, state, metrics={"loss": 0.75})
    return folder


#: A class's example shows these. (Older releases of torch have no `StorageWriter.close`.)
SHOWN_BY_THEIR_CLASS = ("optim.PerRank.", "optim.RngState.", "RsWriter.close")


@pytest.mark.parametrize(
    "name", [*(name for name in FUNCTIONS if not name.startswith(SHOWN_BY_THEIR_CLASS)), *CLASSES]
)
def test_an_example_runs(name, made, tmp_path, monkeypatch):
    value = FUNCTIONS.get(name) or CLASSES[name]
    block = BLOCK.search(inspect.getdoc(value))
    assert block, f"{name} has no example"
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    names = {
        "dcp_rs": dcp_rs,
        "dcp": dcp,
        "torch": torch,
        "signal": signal,
        "model": model,
        "optimizer": optimizer,
    }
    names |= {"state": {"model": model, "step": 0}, "steps": 3, "train_one_step": lambda: 0.25}
    exec(compile(textwrap.dedent(block[1]), name, "exec"), names)
