"""``Checkpoint.stream``: everything in the order of the files, read ahead."""

import threading
import weakref

import pytest
import torch

import dcp_rs
from dcp_rs.checkpoint import stream as streaming
from dcp_rs.errors import CorruptDataError, DcpRsError
from dcp_rs.transfer.load import fill
from support import assert_state_equal, threads
from support.slabs import damage, save_shards


@pytest.fixture
def want(ckpt):
    torch.manual_seed(1)
    state = {f"w{i:02}": torch.randn(100 + i, 300) for i in range(40)}
    state |= {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2),
        "step": 7,
        "zz": torch.empty(3, 0),
    }
    dcp_rs.save(state, ckpt)
    return state


@pytest.mark.parametrize(
    "options", [{}, {"max_inflight_bytes": 300_000}, {"verify": True}, {"io": "direct"}]
)
def test_a_stream_gives_everything(ckpt, want, options):
    with dcp_rs.open(ckpt, **options) as source:
        got = dict(source.stream())
        order = [source._index.name(i) for i in source._index.file_order()]
    assert list(got) == order
    assert_state_equal(got, want)


@pytest.mark.usefixtures("want")
def test_reading_ahead_is_bounded(ckpt, monkeypatch):
    made = []
    monkeypatch.setattr(
        streaming,
        "fill",
        lambda index, targets, options, counts: (
            made.append(sum(t.tensor.nbytes for t in targets)),
            fill(index, targets, options, counts),
        ),
    )
    limit = 1 << 20
    used = 0
    with dcp_rs.open(ckpt, max_inflight_bytes=limit) as source:
        for _, tensor in source.stream():
            used += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
            assert sum(made) - used <= limit
    assert max(made) <= limit // 2


@pytest.mark.usefixtures("want")
def test_a_stream_holds_nothing_that_it_has_handed_over(ckpt):
    with dcp_rs.open(ckpt) as source:
        for name, tensor in source.stream():
            if name == "w03":
                seen = weakref.ref(tensor)
                del tensor
                assert seen() is None
                break


@pytest.mark.usefixtures("want")
def test_a_stream_can_be_left_early(ckpt):
    with dcp_rs.open(ckpt, max_inflight_bytes=1 << 20) as source:
        running = source.stream()
        next(running)
        next(running)
        running.close()
    assert threads.none_of("dcp-rs-slab")
    assert not any(thread.name.startswith("dcp-rs-stream") for thread in threading.enumerate())


@pytest.mark.usefixtures("want")
def test_damage_is_raised_where_it_is(ckpt):
    with dcp_rs.open(ckpt, verify=True, max_inflight_bytes=300_000) as source:
        damage(ckpt, source._index)
        with pytest.raises(CorruptDataError):
            for _ in source.stream():
                pass
    assert threads.none_of("dcp-rs-slab")


@pytest.mark.usefixtures("want")
def test_a_closed_checkpoint_streams_nothing(ckpt):
    source = dcp_rs.open(ckpt)
    source.close()
    with pytest.raises(DcpRsError, match="closed"):
        source.stream()


def test_a_checkpoint_of_shards_streams_whole_tensors(ckpt):
    """Chunks of one tensor in several files, as ranks write them."""
    whole = {"a": torch.randn(90, 40), "b": torch.randn(60, 7)}
    save_shards(ckpt, whole, 3)
    with dcp_rs.open(ckpt) as source:
        assert_state_equal(dict(source.stream()), whole)
