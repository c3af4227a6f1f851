"""Ranks of one machine that want the same of a checkpoint, or parts that lie between each other, have the disk deliver it once.

What each wants alone it reads past the page cache.
"""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsWriter, _core
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.engine.cache_sharing import sample_of
from dcp_rs.engine.cache_sharing import share as prepare
from dcp_rs.engine.load import plan_reads
from dcp_rs.engine.matching import LoadOptions
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions, has_local_peers
from support import assert_state_equal, run_ranks
from support.both import HAS_RANK_LOCAL
from support.files import drop_from_page_cache

SHAPE = (2048, 4096)  # 32 MiB in float32; a quarter of a row is 4 KiB
RANKS = 4


def numbered():
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(torch.float32).reshape(SHAPE)


def delivered():
    """Bytes that storage delivered for this process so far."""
    (line,) = [
        line
        for line in Path("/proc/self/io").read_text().splitlines()
        if line.startswith("read_bytes:")
    ]
    return int(line.split()[1])


def load_cold(folder, placement, shared):
    """What the disk delivered for all ranks, for each byte of the checkpoint."""
    want = numbered()
    if placement is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        want = distribute_tensor(want, mesh, [placement], src_data_rank=None)
    got = {"w": torch.zeros_like(want)}
    if dist.get_rank() == 0:
        drop_from_page_cache(folder)
    dist.barrier()
    before = delivered()
    dcp_rs.load_state_dict(got, RsReader(folder, shared=shared))
    total = torch.tensor([delivered() - before])
    dist.all_reduce(total)
    assert_state_equal(got, {"w": want})
    return total.item() / numbered().nbytes


@pytest.fixture
def saved(ckpt):
    """A checkpoint that can be made cold: not where files lie in memory, or the kernel does not count."""
    dcp_rs.save({"w": numbered()}, ckpt, no_dist=True)
    drop_from_page_cache(ckpt)
    before = delivered()
    for file in ckpt.iterdir():
        file.read_bytes()
    if delivered() - before < numbered().nbytes:
        pytest.skip("files here do not come from a disk, or stay in the page cache")
    return ckpt


@pytest.mark.parametrize(
    "placement",
    [None, Replicate(), Shard(1), Shard(0)],
    ids=["plain", "replica", "columns", "rows"],
)
def test_the_disk_delivers_once(saved, placement):
    for share in run_ranks(RANKS, load_cold, saved, placement, None):
        assert share <= 1.2


#: Of float32 tensors of so many MiB: an embedding that all ranks want, and a layer of each. Norms
#: lie between.
EMBEDDING, LAYER = 16, 24


def pipeline(stages=RANKS):
    """What the ranks of a pipeline want, all of it in one file."""
    state = {
        "embedding": torch.arange(EMBEDDING << 18, dtype=torch.int32)
        .view(torch.float32)
        .reshape(-1, 1024)
    }
    for stage in range(stages):
        first = (stage + 1) << 24
        state[f"layers.{stage}.norm"] = torch.arange(first, first + 1024, dtype=torch.int32).view(
            torch.float32
        )
        layer = torch.arange(first, first + (LAYER << 18), dtype=torch.int32)
        state[f"layers.{stage}.weight"] = layer.view(torch.float32).reshape(-1, 1024)
    return state


class Forgets(RsReader):
    """A class of one's own that tells the other ranks nothing."""

    def prepare_local_plan(self, plan):
        return plan


def load_of_pipeline(
    path, names, reader=RsReader, groups=None, load=dcp_rs.load_state_dict, **options
):
    """Bytes that the disk delivered for all ranks; and the share of this rank's that came past the page cache.

    Args:
        names: what this rank wants begins with, with its number for a ``*``.
        groups: lists of ranks that load apart.
        load: the function that loads.
    """
    whole, rank = pipeline(), dist.get_rank()
    wanted = {
        k: v
        for k, v in whole.items()
        if k.startswith(tuple(name.replace("*", str(rank)) for name in names))
    }
    got = {name: torch.zeros_like(value) for name, value in wanted.items()}
    made = [dist.new_group(group) for group in groups or []]
    group = next((made[i] for i, ranks in enumerate(groups or []) if rank in ranks), None)
    if rank == 0:
        drop_from_page_cache(path)
    dist.barrier()
    before = delivered()
    storage = reader(path, **options)
    load(got, storage_reader=storage, process_group=group)
    total = torch.tensor([delivered() - before])
    dist.all_reduce(total)
    assert_state_equal(got, wanted)
    return total.item() / (1 << 20), storage.report.bytes_direct / storage.report.bytes_read


@pytest.fixture
def of_pipeline(saved):
    dcp_rs.save(pipeline(), saved, no_dist=True)
    return saved


@pytest.mark.parametrize("load", [dcp_rs.load_state_dict, dcp.load])
def test_pipeline_ranks_read_their_own_past_the_page_cache(of_pipeline, load):
    for total, direct in run_ranks(RANKS, load_of_pipeline_with, of_pipeline, {"load": load}):
        assert direct == 1
        assert total <= 1.1 * RANKS * LAYER


def test_shared_regions_of_a_file_are_told_from_own_ones(of_pipeline):
    for total, direct in run_ranks(RANKS, load_of_pipeline, of_pipeline, ["embedding", "layers.*"]):
        assert 0.8 * LAYER / (LAYER + EMBEDDING) < direct < 1.2 * LAYER / (LAYER + EMBEDDING)
        assert total <= 1.1 * (EMBEDDING + RANKS * LAYER)


def test_halves_of_two_replicas_are_read_once(of_pipeline):
    """Ranks 0 and 1 want what lies beside what 2 and 3 want."""
    names = [["layers.0"], ["layers.0"], ["layers.1"], ["layers.1"]]
    for total, direct in run_ranks(RANKS, load_by_rank, of_pipeline, names):
        assert direct == 0
        assert total <= 1.1 * 2 * LAYER


def load_by_rank(path, names):
    return load_of_pipeline(path, names[dist.get_rank()])


@pytest.mark.parametrize(
    "options",
    [
        {"reader": Forgets},
        {"shared": True},
        {"groups": [[0, 1], [2, 3]]},
    ],
    ids=["a reader that says nothing", "who is told to share", "half of the ranks"],
)
def test_unknown_sharing_is_guessed(of_pipeline, options):
    for _, direct in run_ranks(RANKS, load_of_pipeline_with, of_pipeline, options):
        assert direct == 0


def load_of_pipeline_with(path, options):
    return load_of_pipeline(path, ["layers.*"], **options)


def load_apart(path):
    """As :func:`load_of_pipeline`, by half of the ranks, who are said to be all of their machine."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // 2)
    try:
        return load_of_pipeline(path, ["layers.*"], groups=[[0, 1], [2, 3]])
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_a_group_of_all_ranks_of_a_machine_knows(of_pipeline):
    for _, direct in run_ranks(RANKS, load_apart, of_pipeline):
        assert direct == 1


def load_of_each_rank(path):
    """Each rank its own save, in a folder that all have. Returns the share of it that came past the page cache."""
    want = numbered() + dist.get_rank()
    dcp.save({"w": want}, storage_writer=RsWriter(path), use_collectives=False)
    drop_from_page_cache(path)
    dist.barrier()
    got, reader = {"w": torch.zeros(SHAPE)}, RsReader(path)
    dcp.load(got, storage_reader=reader)
    assert_state_equal(got, {"w": want})
    return reader.report.bytes_direct / reader.report.bytes_read


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch saves for all ranks")
def test_nobody_shares_a_rank_local_save(saved):
    assert run_ranks(RANKS, load_of_each_rank, saved / "apart") == [1] * RANKS


def load_replicas(path):
    """What ranks read for each other, each a part. Returns the share of this rank's that came past the page cache."""
    want = {f"w{i}": part for i, part in enumerate(numbered().chunk(16))}
    if dist.get_rank() == 0:
        dcp_rs.save(dict(want), path, no_dist=True)
        drop_from_page_cache(path)
    dist.barrier()
    got, reader = (
        {name: torch.zeros_like(part) for name, part in want.items()},
        RsReader(path, replicas="all"),
    )
    dcp_rs.load_state_dict(got, reader, planner=RsLoadPlanner())
    assert_state_equal(got, want)
    return reader.report.bytes_read, reader.report.bytes_direct


def test_broadcast_reads_are_direct(saved):
    loads = run_ranks(RANKS, load_replicas, saved / "replicas")
    assert sum(read for read, _ in loads) <= 1.1 * numbered().nbytes
    assert all(read == direct for read, direct in loads)


def fail_in_plan(path):
    """A rank that has no such tensor; the others hear of it."""
    got = {"none" if dist.get_rank() == 1 else "embedding": torch.zeros(EMBEDDING << 8, 1024)}
    with pytest.raises(PlanError, match="the checkpoint has no 'none'"):
        dcp_rs.load_state_dict(got, RsReader(path))


def test_a_rank_that_fails_in_its_plan_fails_all(of_pipeline):
    run_ranks(RANKS, fail_in_plan, of_pipeline)


def test_message_of_wanted_regions_is_of_constant_size(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    sizes = []
    for count, rows in ((1, 64), (1, 1 << 15), (300, 1 << 8)):
        path = tmp_path / f"{count}-{rows}"
        state = {f"w{i}": torch.zeros(rows, 512) for i in range(count)}
        dcp_rs.save(state, path, no_dist=True)
        sizes.append(len(planned(path, state)))
    assert sizes[0] == sizes[1] == sizes[2] <= 1200
    for alone in ("1", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", alone)
        assert len(planned(path, state)) < sizes[0]


def planned(path, state):
    """What a rank tells the coordinator."""
    index = open_index(path)
    reads = plan_reads(state, index, LoadOptions())
    sample = sample_of(index, ReadOptions(), reads.regions, reads.batch)
    return pickle.dumps(None if sample is None else prepare(sample))


def test_machines_are_compared_apart(tmp_path):
    dcp_rs.save({"w": numbered()}, tmp_path, no_dist=True)
    index = RsReader(tmp_path).read_metadata().state_dict_metadata.index
    wanted = [_core.Sample(index) for _ in range(3)]
    for each in wanted:
        each.add([(0, False, (0, 0), SHAPE)])
    here, there = b"here", b"there"
    (first, bits), (second, alone), (third, same) = _core.compare_samples(
        [(here, wanted[0].to_bytes()), (there, wanted[1].to_bytes()), (here, wanted[2].to_bytes())]
    )
    assert (first, second, third) == (2, 1, 2)
    assert bits == same
    assert bits[:4] == b"\xff" * 4  # 32 sections of 1 MiB
    assert alone == bytes(32)
    with pytest.raises(dcp_rs.errors.PlanError, match="invalid message"):
        _core.compare_samples([(here, b"abc")])


def test_rank_without_sharing_reads_alone(saved):
    for share in run_ranks(RANKS, load_cold, saved, None, False):
        assert share > 1.2


def test_ranks_of_a_machine_share_by_default(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not has_local_peers()
    for ranks, shared in (("1", False), ("8", True), ("many", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert ReadOptions().engine()["shared"] is shared
        assert ReadOptions(shared=True).engine()["shared"]
        assert not ReadOptions(shared=False).engine()["shared"]
    with pytest.raises(ValueError, match="shared='yes': must be one of True, False, None"):
        ReadOptions(shared="yes")


def _shared_without_a_word():
    del os.environ["LOCAL_WORLD_SIZE"]
    return has_local_peers()


def test_without_a_word_all_ranks_are_taken_to_be_here():
    assert run_ranks(2, _shared_without_a_word) == [True, True]
