"""A fast reader and writer for PyTorch distributed checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_rs._core import __version__

if TYPE_CHECKING:
    from dcp_rs import errors as errors
    from dcp_rs import optim as optim
    from dcp_rs.api import async_save, load, load_state_dict, save
    from dcp_rs.checkpoint.clean import CleanReport, Leftover, clean
    from dcp_rs.checkpoint.fused_experts import views_for
    from dcp_rs.checkpoint.index import index
    from dcp_rs.checkpoint.locate import exists
    from dcp_rs.checkpoint.open import Checkpoint, ReadReport
    from dcp_rs.checkpoint.open import open as open  # noqa: A004  # as in safetensors
    from dcp_rs.checkpoint.verify import VerifyReport, verify
    from dcp_rs.checkpoint.views import Concat, Split, Stack, Transpose, Unstack
    from dcp_rs.conversion import ConvertReport, convert
    from dcp_rs.conversion.merging import MergeReport, merge
    from dcp_rs.dcp.load_planner import RsLoadPlanner
    from dcp_rs.dcp.reader import RsReader
    from dcp_rs.dcp.save_planner import RsSavePlanner
    from dcp_rs.dcp.writer import RsWriter
    from dcp_rs.engine.background import SaveFuture
    from dcp_rs.engine.reports import LoadReport, SavedMetadata, SaveReport
    from dcp_rs.errors import QuantizationError
    from dcp_rs.integrations.install import install, installed, uninstall
    from dcp_rs.integrations.safetensors import load_file, save_file
    from dcp_rs.steps.latest import latest
    from dcp_rs.steps.manager import CheckpointManager
    from dcp_rs.transfer.buffers import release_pinned_memory

# Not ``open``: `from dcp_rs import *` is not to hide Python's.
__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CleanReport",
    "Concat",
    "ConvertReport",
    "Leftover",
    "LoadReport",
    "MergeReport",
    "QuantizationError",
    "ReadReport",
    "RsLoadPlanner",
    "RsReader",
    "RsSavePlanner",
    "RsWriter",
    "SaveFuture",
    "SaveReport",
    "SavedMetadata",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "VerifyReport",
    "__version__",
    "async_save",
    "clean",
    "convert",
    "exists",
    "index",
    "install",
    "installed",
    "latest",
    "load",
    "load_file",
    "load_state_dict",
    "merge",
    "release_pinned_memory",
    "save",
    "save_file",
    "uninstall",
    "verify",
    "views_for",
]

# Loaded when they are first used: most need torch, which takes seconds, and `dcp-rs ls` needs none
# of it.
_MODULES = {
    "api": ("async_save", "load", "load_state_dict", "save"),
    "checkpoint.clean": ("CleanReport", "Leftover", "clean"),
    "checkpoint.fused_experts": ("views_for",),
    "checkpoint.open": ("Checkpoint", "ReadReport", "open"),
    "checkpoint.locate": ("exists",),
    "checkpoint.views": ("Concat", "Split", "Stack", "Transpose", "Unstack"),
    "conversion": ("ConvertReport", "convert"),
    "conversion.merging": ("MergeReport", "merge"),
    "integrations.install": ("install", "installed", "uninstall"),
    "integrations.safetensors": ("load_file", "save_file"),
    "errors": ("QuantizationError",),
    "engine.background": ("SaveFuture",),
    "dcp.load_planner": ("RsLoadPlanner",),
    "engine.reports": ("LoadReport", "SaveReport", "SavedMetadata"),
    "dcp.reader": ("RsReader",),
    "dcp.save_planner": ("RsSavePlanner",),
    "transfer.buffers": ("release_pinned_memory",),
    "steps.latest": ("latest",),
    "steps.manager": ("CheckpointManager",),
    "checkpoint.index": ("index",),
    "checkpoint.verify": ("VerifyReport", "verify"),
    "dcp.writer": ("RsWriter",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
#: Modules that are part of the public surface.
_SUBMODULES = ("errors", "optim")


if not TYPE_CHECKING:  # where types are checked, a name that is not above is an error

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            from dcp_rs._arguments import suggest

            hint = suggest(name, __dir__())
            for module in () if name.startswith("_") else _SUBMODULES:
                if name in import_module(f"{__name__}.{module}").__all__:
                    hint = f"it is dcp_rs.{module}.{name}"
            msg = f"module {__name__!r} has no attribute {name!r}" + (f": {hint}" if hint else "")
            raise AttributeError(msg)
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open", *_SUBMODULES])
