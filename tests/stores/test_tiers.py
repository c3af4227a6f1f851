"""Reads from folders that have some of a checkpoint's files, before the checkpoint's own place."""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, StorageError, UnsupportedError
from support import assert_state_equal, blank, run_ranks
from support.files import flip
from support.object_server import Fault


def data_files(folder):
    return sorted(folder.glob("*.safetensors"))


def data_requests(server):
    return [request for request in server.requests if request.key.endswith(".safetensors")]


@pytest.fixture(params=["folder", "store"])
def place(request, saved, tmp_path, server):
    """(state, arguments that lead to the checkpoint, a tier with all of its files)."""
    state, folder = saved
    tier = tmp_path / "tier"
    shutil.copytree(folder, tier)
    if request.param == "folder":
        return state, {"path": folder}, tier
    options = server.options(max_retries=0)
    return state, {"path": server.url("runs/ckpt"), "storage_options": options}, tier


def load(place, **options):
    state, own, tier = place
    got = blank(state)
    report = dcp_rs.load(got, **{"tiers": [tier], **own, **options})
    assert_state_equal(got, state)
    return report


def test_all_data_comes_from_the_tier(place, server):
    with warnings.catch_warnings(action="error"):
        report = load(place)
    assert report.bytes_from_tiers == {str(place[2]): report.bytes_wanted}
    assert not data_requests(server)


def test_a_missing_file_comes_from_the_checkpoint(place, tmp_path, server):
    second = tmp_path / "second"
    second.mkdir()
    with warnings.catch_warnings(action="error"):
        report = load(place, tiers=[second, tmp_path / "no such folder"])
    assert report.bytes_from_tiers == {}
    shutil.copy(data_files(place[2])[0], second)
    report = load(place, tiers=[second])
    assert report.bytes_from_tiers == {str(second): report.bytes_wanted}


@pytest.mark.parametrize("tear", ["torn", "foreign", "folder", "link", "loop"])
def test_a_file_that_differs_is_passed_over_by_name(place, tear):
    (file,) = data_files(place[2])
    data = file.read_bytes()
    file.unlink()
    if tear == "torn":
        file.write_bytes(data[: len(data) // 2])
    elif tear == "foreign":
        file.write_bytes(data + b"more")
    elif tear == "folder":
        file.mkdir()
    elif tear == "loop":
        file.symlink_to(file)  # the system cannot tell what is there
    else:
        other = file.parent.parent / "outside"
        other.write_bytes(data)
        file.symlink_to(other)
    with pytest.warns(UserWarning, match=f"{file} is passed over"):
        report = load(place)
    assert report.bytes_from_tiers == {}


@pytest.mark.parametrize("io", ["auto", "mmap", "direct", "buffered"])
def test_damage_that_a_read_finds_is_read_from_elsewhere(place, io):
    (file,) = data_files(place[2])
    flip(file)
    with pytest.warns(UserWarning, match=f"{file} is passed over: .*digest"):
        report = load(place, verify=True, io=io)
    # Values were read before.
    assert sum(report.bytes_from_tiers.values()) < report.bytes_wanted / 100


def test_the_next_tier_comes_before_the_checkpoint(place, tmp_path, server):
    second = tmp_path / "second"
    shutil.copytree(place[2], second)
    (file,) = data_files(place[2])
    flip(file)
    with pytest.warns(UserWarning, match="passed over"):
        report = load(place, verify=True, tiers=[place[2], second])
    assert sum(report.bytes_from_tiers.values()) == report.bytes_wanted
    assert report.bytes_from_tiers[str(second)] > report.bytes_wanted * 0.99
    assert not data_requests(server)


def test_damage_everywhere_is_an_error(place, server):
    state, own, tier = place
    for file in data_files(tier):
        flip(file)
    same = {**own, "path": tier, "storage_options": None}
    with pytest.raises(CorruptDataError), warnings.catch_warnings(action="ignore"):
        dcp_rs.load(blank(state), **same, tiers=[tier], verify=True)


def test_a_reader_and_open_read_from_the_tier(place, server):
    state, own, tier = place
    got = blank(state["model"])
    reader = dcp_rs.RsReader(**own, tiers=[tier])
    dcp.load({"model": got}, storage_reader=reader)
    assert_state_equal(got, state["model"])
    assert reader.report.bytes_from_tiers == {str(tier): reader.report.bytes_wanted}
    with dcp_rs.open(**own, tiers=[tier]) as checkpoint:
        for name, tensor in state["model"].items():
            assert torch.equal(checkpoint[f"model.{name}"], tensor)
        assert checkpoint["step"] == 17
    assert not data_requests(server)


def test_damage_under_open_and_dcp_load(place):
    state, own, tier = place
    (file,) = data_files(tier)
    flip(file)
    got = blank(state["model"])
    with pytest.warns(UserWarning, match="passed over"):
        dcp.load({"model": got}, storage_reader=dcp_rs.RsReader(**own, tiers=[tier], verify=True))
    assert_state_equal(got, state["model"])
    checkpoint = dcp_rs.open(**own, tiers=[tier], verify=True)
    with pytest.warns(UserWarning, match="passed over"):
        got = {name: checkpoint[f"model.{name}"] for name in state["model"]}
    assert_state_equal(got, state["model"])


@pytest.mark.parametrize("loss", ["gone", "unreadable"])
def test_a_tier_that_is_lost_after_it_was_found(place, loss):
    """An error of the system, unlike damage, failed the read, though the checkpoint has the file."""
    state, own, tier = place
    checkpoint = dcp_rs.open(**own, tiers=[tier])
    shutil.rmtree(tier)
    if loss == "unreadable":
        tier.symlink_to(tier)
    with pytest.warns(UserWarning, match="passed over"):
        got = {name: checkpoint[f"model.{name}"] for name in state["model"]}
    assert_state_equal(got, state["model"])


def test_a_damaged_index_of_a_tier_is_passed_over(place, tmp_path):
    """The second tier was not asked, and the error named the index of the checkpoint."""
    state, _, tier = place
    second = tmp_path / "second"
    shutil.copytree(tier, second)
    flip(tier / "index.dcprs", 300)
    missing = {"path": tmp_path / "missing"}
    with pytest.warns(UserWarning, match=f"{tier}/index.dcprs is passed over: .*digest"):
        load((state, missing, tier), tiers=[tier, second])
    flip(second / "index.dcprs", 300)
    with pytest.raises(CheckpointNotFoundError):
        load((state, missing, tier), tiers=[tier, second])


def test_damage_below_a_device_load(place, sim, device):
    state, own, tier = place
    (file,) = data_files(tier)
    flip(file)
    got = {"model": {n: torch.zeros_like(t).to(device) for n, t in state["model"].items()}}
    with pytest.warns(UserWarning, match="passed over"):
        dcp_rs.load(got, **own, tiers=[tier], verify=True)
    assert_state_equal({n: t.cpu() for n, t in got["model"].items()}, state["model"])


def test_the_index_of_a_tier_counts_where_there_is_none_or_no_store(place, server):
    state, own, tier = place
    if "storage_options" in own:
        server.faults = [Fault(status=503, times=None)]
    else:
        shutil.rmtree(own["path"])
    with pytest.raises((CheckpointNotFoundError, StorageError)):
        dcp_rs.load(blank(state), **own)
    load(place)
    (tier / "index.dcprs").unlink()
    with pytest.raises((CheckpointNotFoundError, StorageError)):
        dcp_rs.load(blank(state), **own, tiers=[tier])


def test_an_index_at_its_place_counts_before_that_of_a_tier(place, tmp_path):
    """A save replaced the checkpoint, so its old files are none of the new one."""
    state, own, tier = place
    new = {**state, "step": 18}
    with warnings.catch_warnings(action="ignore"):
        dcp_rs.save(new, **own)
    report = load((new, own, tier))
    assert report.bytes_from_tiers == {}


def test_tiers_are_folders(place):
    with pytest.raises(TypeError, match="a list of folders"):
        load(place, tiers="/tmp/x")
    with pytest.raises(UnsupportedError, match="local path"):
        load(place, tiers=["s3://bucket/x"])


def whole():
    return torch.arange(12_000.0).reshape(1000, 12)


def sharded(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def save_sharded(path):
    dcp_rs.save({"rows": sharded(whole()), "step": 7}, path)


def load_sharded(path, tiers, verify="auto"):
    state = {"rows": sharded(torch.zeros(1000, 12)), "step": 0}
    with warnings.catch_warnings(action="ignore"):
        report = dcp_rs.load(state, path, tiers=tiers, verify=verify)
    assert torch.equal(state["rows"].full_tensor(), whole())
    assert state["step"] == 7
    return report


def test_other_world_sizes_and_replicas_read_from_tiers(tmp_path):
    """Two tiers have a file each; the third file is at the checkpoint alone."""
    run_ranks(3, save_sharded, tmp_path / "ckpt")
    files, tiers = data_files(tmp_path / "ckpt"), [tmp_path / "a", tmp_path / "b"]
    for file, tier in zip(files, tiers, strict=False):
        tier.mkdir()
        shutil.copy(file, tier)
    for size in (1, 2, 4):
        reports = run_ranks(size, load_sharded, tmp_path / "ckpt", tiers)
        total = [sum(r.bytes_from_tiers.get(str(tier), 0) for r in reports) for tier in tiers]
        assert all(total)
        assert sum(total) < sum(report.bytes_wanted for report in reports)


def test_damage_on_one_rank_alone_stops_no_other(tmp_path):
    run_ranks(2, save_sharded, tmp_path / "ckpt")
    tier = tmp_path / "tier"
    shutil.copytree(tmp_path / "ckpt", tier)
    for file in data_files(tier)[1:]:
        flip(file, -100)
    reports = run_ranks(2, load_sharded, tmp_path / "ckpt", [tier], True)
    # One rank has all its rows from the tier: either, as the names of files are random.
    from_tier = sorted(report.bytes_from_tiers.get(str(tier), 0) for report in reports)
    assert from_tier[0] < 500 * 12 * 4 <= from_tier[1]
