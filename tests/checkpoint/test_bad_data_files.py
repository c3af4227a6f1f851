"""Data files that are missing, of another length, or damaged: one typed error that names file, tensor, place."""

import os
import shutil

import pytest
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import CorruptDataError, UnsupportedError
from support import assert_state_equal, blank, nested_state
from support.both import save_rs, save_stock
from support.failures import (
    STATE,
    WAYS,
    data_file,
    failure,
    loaded,
    read_whole,
    without_torchs_collection,
)
from support.files import flip


def place_of(path, name):
    with dcp_rs.open(path) as checkpoint:
        chunk = checkpoint.chunks(name)[0]
    return path / chunk.file, chunk.offset


def moved_behind_a_link(file):
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def replaced(make):
    def replace(file):
        file.unlink()
        make(file)

    return replace


#: What becomes of a data file, by what it is then.
REPLACEMENTS = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "a link": moved_behind_a_link,
    "a folder": replaced(os.mkdir),
    "a pipe": replaced(os.mkfifo),
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_data_file_that_is_replaced_is_named(saved_blocks, way, replace):
    file = data_file(saved_blocks)
    replace(file)
    leads_out = replace is moved_behind_a_link
    error = failure(UnsupportedError if leads_out else CorruptDataError, way, saved_blocks)
    assert str(file) in str(error)
    if not leads_out:
        assert (error.path, error.tensor, error.offset) == (str(file), None, None)


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
@pytest.mark.parametrize("mode", ["auto", "mmap", "direct", "buffered"])
def test_a_data_file_of_another_length(saved_blocks, change, mode):
    file = data_file(saved_blocks)
    size = file.stat().st_size
    os.truncate(file, size + change)
    template = blank(STATE)
    before = blank(STATE)
    error = failure(CorruptDataError, loaded, saved_blocks, template, io=mode)
    assert (error.path, error.tensor, error.offset) == (str(file), None, None)
    assert str(size) in str(error)
    assert str(size + change) in str(error)
    assert_state_equal(template, before)
    failure(CorruptDataError, read_whole, saved_blocks)


@pytest.mark.parametrize("way", WAYS)
def test_an_indexed_folder_that_was_copied_says_the_way_out(tmp_path, way):
    save_stock(STATE, tmp_path / "stock")
    dcp_rs.index(tmp_path / "stock")
    shutil.copytree(
        tmp_path / "stock", tmp_path / "copy", copy_function=shutil.copy
    )  # as `cp -r`, with times of its own
    error = failure(CorruptDataError, way, tmp_path / "copy")
    assert (error.tensor, error.offset) == (None, None)
    assert "dcp_rs.index(path, overwrite=True)" in str(error)
    assert " ns" not in str(error)
    dcp_rs.index(tmp_path / "copy", overwrite=True)
    way(tmp_path / "copy")


def test_a_folder_that_is_a_link_is_followed(saved_blocks, tmp_path):
    (tmp_path / "link").symlink_to(saved_blocks)
    assert_state_equal(loaded(tmp_path / "link"), STATE)


@pytest.mark.parametrize("mode", ["auto", "mmap", "direct", "buffered"])
@pytest.mark.parametrize(
    ("name", "block"), [("large", 0), ("large", 1), ("large", 2), ("small", 0)]
)
def test_a_flipped_bit_is_found_by_verification(saved_blocks, mode, name, block):
    file, offset = place_of(saved_blocks, name)
    flip(file, offset + block * (1 << 20) + 17, bit=3)
    committed = []

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            committed.append(read_item.dest_index.fqn)
            super().commit_tensor(read_item, tensor)

    def loaded_by_planner(path, template, **options):
        reader = RsReader(path, **options)
        with without_torchs_collection():
            dcp_rs.load_state_dict(template, reader, planner=Planner(), no_dist=True)

    for load in (loaded, loaded_by_planner):
        template = {name: blank(STATE[name])}
        error = failure(CorruptDataError, load, saved_blocks, template, verify=True, io=mode)
        assert error.tensor == name
        assert error.offset == offset + block * (1 << 20)
        assert error.path == str(file)
    assert committed == []
    # What is whole still loads, and without verification no one looks.
    other = "small" if name == "large" else "large"
    rest = loaded(saved_blocks, {other: blank(STATE[other])}, verify=True, io=mode)
    assert_state_equal(rest[other], STATE[other])
    loaded(saved_blocks, blank(STATE), io=mode, verify=False)


def test_a_flipped_bit_of_a_value_is_found_by_verification(saved_blocks):
    file, offset = place_of(saved_blocks, "step")
    flip(file, offset + 5)
    error = failure(CorruptDataError, loaded, saved_blocks, {"step": 0}, verify=True)
    assert (error.tensor, error.offset) == ("step", offset)


def test_a_part_of_a_damaged_tensor_loads_where_it_is_whole(saved_blocks):
    file, offset = place_of(saved_blocks, "large")
    flip(file, offset + (2 << 20) + 5)
    with dcp_rs.open(saved_blocks, verify=True) as checkpoint:
        failure(CorruptDataError, checkpoint.__getitem__, "large")
    with dcp_rs.open(saved_blocks) as checkpoint:
        assert_state_equal(checkpoint.get_slice("large")[:100], STATE["large"][:100])


def test_nested_values_survive_a_failed_load(tmp_path):
    want = nested_state()
    save_rs(want, tmp_path / "nested")
    data_file(tmp_path / "nested").unlink()
    template = blank(want)
    failure(CorruptDataError, loaded, tmp_path / "nested", template)
    assert_state_equal(template, blank(want))
