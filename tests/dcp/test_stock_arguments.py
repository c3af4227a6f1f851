"""``RsWriter`` and ``RsReader`` where a script passes the arguments of the classes of torch that they replace."""

import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import UnsupportedError

STATE = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}


class Secret(StreamTransformExtension):
    """As somebody has it who must encrypt what is stored."""

    @staticmethod
    def from_descriptor(version: str) -> "Secret":
        return Secret()

    @staticmethod
    def registry_name() -> str:
        return "secret"

    def get_descriptor(self) -> str:
        return "secret/1"

    def transform_to(self, output):
        return output

    def transform_from(self, input):  # noqa: A002  # torch's name
        return input


def round_trip(writer: RsWriter) -> None:
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(3, 4), "step": 0}
    dcp.load(target, storage_reader=RsReader(writer.path), no_dist=True)
    assert torch.equal(target["w"], STATE["w"])
    assert target["step"] == 3


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (FileSystemWriter, RsWriter),
        (FileSystemReader, RsReader),
        (HuggingFaceStorageReader, RsReader),
    ],
)
def test_every_argument_of_stock_is_taken(stock, ours):
    theirs = inspect.signature(stock).parameters
    assert not theirs.keys() - inspect.signature(ours).parameters.keys()


def test_the_writer_s_arguments_do_what_they_say(ckpt):
    written = RsWriter(
        ckpt, thread_count=3, sync_files=False, cache_staged_state_dict=True, overwrite=False
    )
    assert written.options.engine()["threads"] == 3
    assert written.options.engine()["fsync"] is False
    assert written.overwrite is False
    round_trip(written)
    # In stock's order.
    same = RsWriter(ckpt, True, False, 3, 10_000_000, False, False)
    assert (same.options, same.overwrite) == (written.options, written.overwrite)
    by_default = RsWriter(ckpt)
    assert (by_default.options.fsync, by_default.options.threads, by_default.overwrite) == (
        True,
        None,
        True,
    )
    assert RsWriter(ckpt, sync_files=True).options.fsync is True
    assert RsWriter(ckpt, fsync=False).options.fsync is False
    ignored = {"single_file_per_rank": False, "per_thread_copy_ahead": 5, "_extensions": None}
    RsWriter(ckpt, **ignored, serialization_format=SerializationFormat.TORCH_SAVE)
    RsWriter(ckpt, serialization_format=SerializationFormat.SAFETENSORS)


def test_arguments_that_change_the_bytes_are_refused(ckpt):
    """Encryption that is left out, with nothing but a warning, is worse than none."""
    with pytest.raises(UnsupportedError, match="_extensions"):
        RsWriter(ckpt, _extensions=[Secret()])
    assert not ckpt.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thread_count": 2, "threads": 3}, "thread_count.*threads"),
        ({"sync_files": True, "fsync": False}, "sync_files.*fsync"),
        ({"thread_count": 0}, "threads=0"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_one_option_under_two_names(ckpt, arguments, message):
    with pytest.raises(ValueError, match=message):
        RsWriter(ckpt, **arguments)
    if "sync_files" not in arguments:
        with pytest.raises(ValueError, match=message):
            RsReader(ckpt, **arguments)


def test_the_reader_s_arguments(ckpt):
    round_trip(RsWriter(ckpt))
    reader = RsReader(ckpt, thread_count=2)
    assert reader._source.read.engine()["threads"] == 2
    reader = RsReader(ckpt, _extension_registry=ExtensionRegistry())
    target = {"w": torch.zeros(3, 4), "step": 0}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["w"], STATE["w"])


def test_a_token_of_the_hub_is_taken_and_not_kept(ckpt):
    assert "hf_secret" not in f"{vars(RsReader(ckpt, token='hf_secret'))}"
