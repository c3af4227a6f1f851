"""``dcp_rs.install``: torch's own names, and what finds them there, give this package's reader and writer."""

import pickle
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils, hf_storage
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_rs
from dcp_rs import RsReader, RsWriter
from support import assert_state_equal, run_ranks

STOCK = dcp.FileSystemReader, dcp.FileSystemWriter


def state():
    torch.manual_seed(0)
    return {"model": {"w": torch.randn(32, 8), "b": torch.randn(8)}, "step": 7}


def blank(like):
    return {"model": {name: torch.zeros_like(t) for name, t in like["model"].items()}, "step": 0}


def is_ours(folder):
    return (folder / "index.dcprs").exists() and not (folder / ".metadata").exists()


def test_saves_and_loads_by_checkpoint_id(ckpt):
    want = state()
    with dcp_rs.installed():
        dcp.save(want, checkpoint_id=ckpt, no_dist=True)
        assert is_ours(ckpt)
        got = blank(want)
        dcp.load(got, checkpoint_id=ckpt, no_dist=True)
    assert_state_equal(got, want)


def test_stock_checkpoint_loads(ckpt):
    want = state()
    dcp.save(want, checkpoint_id=ckpt, no_dist=True)
    got = blank(want)
    with dcp_rs.installed():
        dcp.load(got, checkpoint_id=ckpt, no_dist=True)
    assert_state_equal(got, want)


def test_the_names_give_ours_and_take_what_stocks_take(ckpt):
    want = state()
    with dcp_rs.installed():
        writer = dcp.FileSystemWriter(str(ckpt), thread_count=2, sync_files=False, overwrite=True)
        assert type(writer) is RsWriter
        assert isinstance(writer, dcp.FileSystemWriter)
        assert isinstance(writer, filesystem.FileSystemWriter)
        assert issubclass(RsWriter, dcp.FileSystemWriter)
        assert (writer.options.threads, writer.options.fsync) == (2, False)
        dcp.save(want, storage_writer=writer, no_dist=True)
        reader = dcp.FileSystemReader(ckpt)
        assert type(reader) is RsReader
        assert dcp.FileSystemReader.validate_checkpoint_id(ckpt)
        got = blank(want)
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert_state_equal(got, want)
        # What was made before is of the same kind as ever.
        assert isinstance(STOCK[0](ckpt), dcp.FileSystemReader)
        pickle.dumps(reader)


def test_a_class_of_ones_own_goes_on_to_derive_from_stocks(ckpt):
    with dcp_rs.installed():

        class Mine(dcp.FileSystemWriter):
            """As frameworks have them."""

            def write_data(self, plan, planner):
                self.seen = True
                return super().write_data(plan, planner)

        assert Mine.__mro__[1] is STOCK[1]
        mine = Mine(ckpt)
        dcp.save(state(), storage_writer=mine, no_dist=True)
        assert mine.seen
        assert (ckpt / ".metadata").exists()
        assert issubclass(Mine, dcp.FileSystemWriter)
        assert STOCK[0] in hf_storage.HuggingFaceStorageReader.__mro__


def test_everything_is_put_back():
    before = {
        (module.__name__, name): getattr(module, name)
        for module in (dcp, filesystem, _storage_utils, format_utils, hf_storage)
        for name in ("FileSystemReader", "FileSystemWriter")
        if hasattr(module, name)  # torch 2.8 has none of them in hf_storage
    }
    dcp_rs.install()
    dcp_rs.install()
    assert dcp.FileSystemReader is not STOCK[0]
    dcp_rs.uninstall()
    assert dcp.FileSystemReader is not STOCK[0]
    dcp_rs.uninstall()
    for (module, name), value in before.items():
        assert vars(__import__(module, fromlist=[name]))[name] is value, (module, name)
    with pytest.raises(RuntimeError, match="nothing to undo"):
        dcp_rs.uninstall()


def test_modules_that_may_not_be_imported_are_passed_over(monkeypatch):
    """``sys.modules[name] = None`` prevents an import. It was an error here."""
    monkeypatch.setitem(sys.modules, "blocked", None)
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.blocked", None)
    with dcp_rs.installed():
        assert dcp.FileSystemReader is not STOCK[0]


def test_after_an_install_that_failed_the_next_one_works(monkeypatch):
    """It was counted, so the next one did nothing, and what was replaced stayed so."""

    def fail():
        raise ImportError("no executors")

    with monkeypatch.context() as patch:
        patch.setattr("dcp_rs._torch.async_executors", fail)
        with pytest.raises(ImportError, match="no executors"):
            dcp_rs.install()
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == STOCK
    with dcp_rs.installed():
        assert dcp.FileSystemReader is not STOCK[0]
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == STOCK


def test_install_lists_the_replaced_classes(caplog):
    with caplog.at_level("INFO", "dcp_rs"), dcp_rs.installed():
        pass
    first, last = (record.message for record in caplog.records)
    assert "torch.distributed.checkpoint.FileSystemWriter" in first
    assert "torch.distributed.checkpoint._storage_utils.FileSystemReader" in first
    assert "own again" in last


def test_urls_stay_with_torch():
    with dcp_rs.installed(), pytest.raises(RuntimeError, match="Cannot detect"):
        dcp.save(state(), checkpoint_id="nowhere://bucket", no_dist=True)


def test_torchs_conversions_read_and_write_ours(ckpt, tmp_path):
    want = state()
    with dcp_rs.installed():
        dcp.save(want, checkpoint_id=ckpt, no_dist=True)
        format_utils.dcp_to_torch_save(ckpt, tmp_path / "file.pt")
        assert_state_equal(torch.load(tmp_path / "file.pt"), want)
        format_utils.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "back")
        assert is_ours(tmp_path / "back")
        got = blank(want)
        dcp.load(got, checkpoint_id=tmp_path / "back", no_dist=True)
    assert_state_equal(got, want)


def save_in_the_background(folder, kind):
    rank = torch.distributed.get_rank()
    want = {"w": torch.full((4, 4), float(rank)), "step": 3}
    with dcp_rs.installed():
        future = dcp.async_save(
            {f"rank{rank}": want},
            checkpoint_id=folder,
            async_checkpointer_type=AsyncCheckpointerType[kind],
        )
    future.result()
    got = {f"rank{rank}": {"w": torch.zeros(4, 4), "step": 0}}
    with dcp_rs.installed():
        dcp.load(got, checkpoint_id=folder)
    assert_state_equal(got, {f"rank{rank}": want})
    return True


@pytest.mark.parametrize("kind", ["THREAD", pytest.param("PROCESS", marks=pytest.mark.slow)])
def test_saves_in_the_background_are_ours(ckpt, kind):
    """In the process that torch saves in nothing is installed, and here it is not any more when the save begins."""
    assert run_ranks(2, save_in_the_background, ckpt, kind) == [True, True]
    assert is_ours(ckpt)
