"""The zip archives that a conversion writes: laid out by torch, filled by this package, with all of their checksums."""

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import CorruptDataError, UnsupportedError
from support import assert_state_equal, random_tensor
from support.formats import judge, make
from support.states import ALL_DTYPES, can_copy

DTYPES = [dtype for dtype in ALL_DTYPES if can_copy(dtype)]
SHAPES = st.sampled_from(
    [(), (0,), (1,), (3, 0, 2), (7,), (5, 3), (1, 2, 1, 3), (1 << 19,), (3, 350_001)]
)


def check_archive(data: io.BytesIO | Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(data) as archive:
        assert archive.testzip() is None
        # What torch's own readers go by stands in front of the bytes too.
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)
        return archive


def check_folder(folder: Path) -> int:
    """Looks at every archive of a stock folder, and says how many there are."""
    places = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    for place in places:
        data = (folder / place.relative_path).read_bytes()[
            place.offset : place.offset + place.length
        ]
        check_archive(io.BytesIO(data))
    return len(places)


def test_archives_have_their_checksums(tmp_path: Path) -> None:
    """Conversion has torch leave them out, for speed; they are added after."""
    state = {
        "large": random_tensor((1500, 1000), seed=1),
        "empty": torch.empty(0),
        "scalar": torch.tensor(2),
        "step": 7,
    }
    make("dcp-rs", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "x.pt", to="torch")
    assert len(check_archive(tmp_path / "x.pt").infolist()) >= 7
    dcp_rs.convert(tmp_path / "src", tmp_path / "dcp", to="dcp", shards=2)
    assert check_folder(tmp_path / "dcp") == 4
    # The next save of this process has its own.
    torch.save(state, tmp_path / "own.pt")
    check_archive(tmp_path / "own.pt")


@settings(
    max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    tensors=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6),
    views=st.booleans(),
    shards=st.integers(1, 3),
    io_bytes=st.sampled_from([None, 1 << 20]),
)
def test_whatever_is_in_them(
    tmp_path_factory, tensors, views: bool, shards: int, io_bytes: int | None
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    state = {
        f"t{i}": random_tensor(shape, dtype, seed=i) for i, (shape, dtype) in enumerate(tensors)
    }
    state |= {"value": {1, 2}, "bytes": bytes(range(256)) * 300}
    if views:
        base = random_tensor((40, 60), seed=99)
        state |= {
            "tied": base,
            "too": base,
            "rows": base[3:9],
            "columns": base[:, 3:9],
            "transposed": base.t(),
        }
    torch.save(state, tmp_path / "src.pt")
    dcp_rs.convert(
        tmp_path / "src.pt",
        tmp_path / "x.pt",
        to="torch",
        max_inflight_bytes=io_bytes,
        weights_only=False,
    )
    check_archive(tmp_path / "x.pt")
    for mapped in (False, True):
        again = torch.load(tmp_path / "x.pt", mmap=mapped, weights_only=True)
        assert_state_equal(again, state)
        if views:
            assert again["tied"].data_ptr() == again["too"].data_ptr()
    dcp_rs.convert(
        tmp_path / "src.pt", tmp_path / "dcp", to="dcp", shards=shards, max_inflight_bytes=io_bytes
    )
    judge("dcp", tmp_path / "dcp", state)
    assert check_folder(tmp_path / "dcp") == len(state)


def test_values_that_hold_tensors(tmp_path: Path) -> None:
    """A value goes to torch whole, with the bytes of the tensors in it."""
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 2, torch.qint8)
    state = {"sparse": torch.eye(50).to_sparse(), "quantized": quantized, "w": torch.arange(9.0)}
    torch.save(state, tmp_path / "src.pt")
    dcp_rs.convert(tmp_path / "src.pt", tmp_path / "x.pt", to="torch")
    check_archive(tmp_path / "x.pt")
    again = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(again["sparse"].to_dense(), torch.eye(50))
    assert torch.equal(again["quantized"].int_repr(), quantized.int_repr())
    assert torch.equal(again["w"], state["w"])


def test_many_small_ones(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": random_tensor((i % 7, 5), torch.bfloat16, seed=i) for i in range(300)}
    make("dcp-rs", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "x.pt", to="torch", dtype="fp32")
    check_archive(tmp_path / "x.pt")
    judge("torch", tmp_path / "x.pt", {name: tensor.float() for name, tensor in state.items()})
    dcp_rs.convert(tmp_path / "src", tmp_path / "dcp", to="dcp", dtype="fp32")
    assert check_folder(tmp_path / "dcp") == 300
    judge("dcp", tmp_path / "dcp", {name: tensor.float() for name, tensor in state.items()})


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_torch_that_would_write_what_stands_for_a_tensor(
    to: str, tmp_path: Path, monkeypatch
) -> None:
    """What it copied would be zeros in the result."""
    make("dcp-rs", {"model": {"weight": torch.ones(50, 50)}, "step": 3}, tmp_path / "src")
    save = torch.save

    def copying(obj, f) -> None:
        copied = (
            obj.clone()
            if isinstance(obj, torch.Tensor)
            else {"model": {"weight": obj["model"]["weight"].clone()}}
        )
        save(copied, f)

    monkeypatch.setattr(torch, "save", copying)
    with pytest.raises(
        UnsupportedError, match=r"does not write 'model\.weight' as it lies in memory"
    ):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    assert {entry.name for entry in tmp_path.iterdir()} == {"src"}


def test_other_files_get_no_checksums(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(100)}, buffer)
    good = buffer.getvalue()
    descriptor = good.index(b"PK\x07\x08")
    for bad in (
        good[:-1],
        good[:descriptor] + b"????" + good[descriptor + 4 :],
        b"PK\x03\x04",
        b"",
    ):
        stream = _core.Template(1, 0)
        assert stream.write(bad) == len(bad)
        with pytest.raises(CorruptDataError, match=r"x\.pt"):
            stream.seal("x.pt", [(0, len(bad))], [], 1)
    stream = _core.Template(1, 0)
    stream.write(good)
    with pytest.raises(CorruptDataError):
        stream.seal("x.pt", [(0, len(good) + 1)], [], 1)
    stream.seal("x.pt", [(0, len(good))], [], 1)
    assert stream.pieces() == [(0, len(good))]
    assert stream.tell() == len(good)
