"""A fast reader and writer for PyTorch distributed checkpoints."""

from dcp_rs._core import __version__
from dcp_rs.api import async_save, load, load_state_dict, save
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.checkpoint import open_checkpoint as open  # noqa: A004  # the name that users of safetensors expect
from dcp_rs.options import ReadOptions, WriteOptions
from dcp_rs.planner import LoadReport, RsLoadPlanner
from dcp_rs.reader import RsReader
from dcp_rs.staging import release_pinned_memory
from dcp_rs.verification import VerifyReport, index, verify
from dcp_rs.writer import RsWriter

__all__ = [
    "Checkpoint",
    "LoadReport",
    "ReadOptions",
    "RsLoadPlanner",
    "RsReader",
    "RsWriter",
    "VerifyReport",
    "WriteOptions",
    "__version__",
    "async_save",
    "index",
    "load",
    "load_state_dict",
    "open",
    "release_pinned_memory",
    "save",
    "verify",
]
