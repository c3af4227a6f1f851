"""Whose memory the tensors of an opened checkpoint are."""

import gc
import os
import shutil
import threading

import pytest
import torch

import dcp_rs
from dcp_rs.errors import DcpRsError
from support import assert_state_equal
from support.both import save_rs
from support.layouts import WHOLE
from support.memory import anonymous


def test_two_look_ups_share_memory(saved_whole):
    with dcp_rs.open(saved_whole) as checkpoint:
        one, two = checkpoint["w"], checkpoint["w"]
        assert one.data_ptr() == two.data_ptr()
        one[0, 0] = -1
        assert two[0, 0] == -1
        assert checkpoint.get_slice("w")[0, 0] == -1


def test_writing_changes_no_file(saved_whole):
    files = {file: file.read_bytes() for file in saved_whole.iterdir()}
    with dcp_rs.open(saved_whole) as checkpoint:
        checkpoint["w"].fill_(-1)
        checkpoint["b"].mul_(2)
        checkpoint.get_slice("b")[1:3].zero_()
    assert {file: file.read_bytes() for file in saved_whole.iterdir()} == files
    with dcp_rs.open(saved_whole) as checkpoint:
        assert_state_equal(checkpoint["w"], WHOLE)


def test_tensors_outlive_the_checkpoint_and_its_folder(sharded, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(sharded, path)
    checkpoint = dcp_rs.open(path)
    alone, rows, cut = (
        checkpoint["alone"],
        checkpoint["rows"],
        checkpoint.get_slice("alone")[2:9:3, 1],
    )
    untouched = checkpoint.get_slice("alone")[5]
    checkpoint.close()
    del checkpoint
    shutil.rmtree(path)
    gc.collect()
    assert_state_equal(alone, WHOLE)
    assert_state_equal(rows, WHOLE)
    assert_state_equal(cut, WHOLE[2:9:3, 1])
    assert_state_equal(untouched, WHOLE[5])


def test_a_closed_checkpoint_says_so(saved_whole):
    checkpoint = dcp_rs.open(saved_whole)
    sliced = checkpoint.get_slice("w")
    checkpoint.close()
    checkpoint.close()
    for use in (lambda: checkpoint["w"], lambda: checkpoint.info("w"), lambda: sliced[0]):
        with pytest.raises(DcpRsError, match="closed"):
            use()


def test_a_tensor_in_one_piece_is_not_copied(ckpt):
    save_rs({"large": torch.zeros(64 << 20, dtype=torch.uint8)}, ckpt, fsync=False)
    with dcp_rs.open(ckpt) as checkpoint:
        before = anonymous()
        tensor = checkpoint["large"]
        assert anonymous() - before < 8 << 20
        assert int(tensor[::4096].sum()) == 0


def test_threads_share_a_checkpoint(sharded):
    failures = []
    with dcp_rs.open(sharded) as checkpoint:

        def use():
            try:
                for _ in range(20):
                    assert_state_equal(checkpoint["rows"], WHOLE)
                    assert_state_equal(checkpoint["alone"], WHOLE)
                    assert_state_equal(checkpoint.get_slice("blocks")[3:8, 2], WHOLE[3:8, 2])
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_state_dict_with_memory_of_its_own(saved_whole):
    with dcp_rs.open(saved_whole) as checkpoint:
        views, copied = checkpoint.state_dict(), checkpoint.state_dict(copy=True)
        views["w"].zero_()  # of the mapping, which no copy sees
        assert torch.equal(copied["w"], WHOLE)
        assert list(copied) == list(views)
        assert copied["step"] == 7
    for file in saved_whole.glob("*.safetensors"):
        os.truncate(file, 0)
    assert torch.equal(copied["b"], torch.arange(5))
