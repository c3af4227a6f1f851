"""What came to the destination while a conversion was at work stays as it is; so does what could not be replaced."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcp_rs
import dcp_rs.conversion.output
from dcp_rs.errors import CheckpointExistsError
from support.formats import judge, leftovers, make

KINDS = [
    ("torch", "o.pt"),
    ("safetensors", "o.safetensors"),
    ("safetensors", "o"),
    ("dcp", "o"),
    ("dcp-rs", "o"),
]


def once(work: Callable[[], object]) -> Callable[[int, int], None]:
    """Does `work` at the first report of progress."""
    todo = [work]

    def hook(_done: int, _total: int) -> None:
        if todo:
            todo.pop()()

    return hook


def contents(path: Path) -> dict[str, bytes] | bytes:
    if path.is_file():
        return path.read_bytes()
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".dcprs.lock"}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return make("torch", {"w": torch.ones(1000)}, tmp_path / "src.pt")


@pytest.mark.parametrize(("to", "name"), KINDS)
@pytest.mark.parametrize("is_file", [False, True])
def test_destination_made_meanwhile_stays(src: Path, to: str, name: str, is_file: bool) -> None:
    dst = src.parent / name

    def come() -> None:
        if is_file:
            dst.write_text("precious")
        else:
            dst.mkdir()
            (dst / "notes").write_text("precious")

    with pytest.raises(CheckpointExistsError, match="was created meanwhile") as raised:
        dcp_rs.convert(src, dst, to=to, progress=once(come))
    assert raised.value.path == str(dst)
    assert contents(dst) == (b"precious" if is_file else {"notes": b"precious"})
    assert not leftovers(src.parent)


@pytest.mark.parametrize(("to", "name"), KINDS)
def test_only_what_was_there_is_replaced(src: Path, to: str, name: str) -> None:
    """With overwrite=True: a checkpoint that another wrote there since is not what the caller knew of."""
    dst = src.parent / name
    old, newer = (
        make("torch", {"w": torch.zeros(3)}, src.parent / "old.pt"),
        {"w": torch.full((9,), 7.0)},
    )
    dcp_rs.convert(old, dst, to=to)
    make("torch", newer, src.parent / "newer.pt")

    def come() -> None:
        dcp_rs.convert(src.parent / "newer.pt", dst, to=to, overwrite=True)

    with pytest.raises(CheckpointExistsError, match="was created meanwhile"):
        dcp_rs.convert(src, dst, to=to, overwrite=True, progress=once(come))
    with dcp_rs.open(dst) as found:
        assert torch.equal(found["w"], newer["w"])
    dcp_rs.convert(src, dst, to=to, overwrite=True)
    with dcp_rs.open(dst) as found:
        assert torch.equal(found["w"], torch.ones(1000))
    assert not leftovers(src.parent)


def test_a_save_or_a_file_that_came_into_the_folder_stays(src: Path) -> None:
    dst = src.parent / "dst"
    dcp_rs.save({"w": torch.zeros(2)}, dst)
    for come in (
        lambda: dcp_rs.save({"w": torch.full((2,), 7.0)}, dst),
        lambda: (dst / "notes.txt").write_text("mine"),
    ):
        with pytest.raises(CheckpointExistsError, match="was created meanwhile"):
            dcp_rs.convert(src, dst, overwrite=True, progress=once(come))
        judge("dcp-rs", dst, {"w": torch.full((2,), 7.0)})
    assert (dst / "notes.txt").read_text() == "mine"
    assert not leftovers(src.parent)


@pytest.mark.parametrize(("to", "name"), KINDS)
def test_two_conversions_to_one_place_leave_one(tmp_path: Path, to: str, name: str) -> None:
    meet = threading.Barrier(2)
    came: dict[int, object] = {}

    def convert(number: int) -> None:
        src = make("torch", {"w": torch.full((1000,), float(number))}, tmp_path / f"{number}.pt")
        try:
            came[number] = dcp_rs.convert(
                src, tmp_path / name, to=to, progress=once(meet.wait)
            ).written
        except CheckpointExistsError as error:
            came[number] = error

    threads = [threading.Thread(target=convert, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number in came if came[number] == ["w"]]
    assert isinstance(came[1 - winner], CheckpointExistsError)
    with dcp_rs.open(tmp_path / name) as found:
        assert found["w"][0] == winner
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("displaced", [False, True])
def test_the_old_one_outlives_a_replacement_that_fails(
    src: Path, monkeypatch: pytest.MonkeyPatch, displaced: bool
) -> None:
    """Where it takes two steps, and the disk fails at the second: it is put back, or left where it is, and that is named."""
    dst = src.parent / "dst"
    dcp_rs.save({"w": torch.zeros(2)}, dst)

    def put_in_place(made: Path, to: Path, _before: object) -> None:
        if not displaced:
            raise OSError(errno.EIO, "failed", to)
        aside = f"{made}.replaced"
        Path(to).rename(aside)
        raise OSError(errno.EIO, "failed", to, None, aside)

    monkeypatch.setattr(dcp_rs.conversion.output._core, "put_in_place", put_in_place)
    with pytest.raises(OSError, match="failed") as raised:
        dcp_rs.convert(src, dst, overwrite=True)
    judge("dcp-rs", Path(raised.value.filename2) if displaced else dst, {"w": torch.zeros(2)})
    assert bool(leftovers(src.parent)) == displaced
    if displaced:
        assert [(left.kind, left.verdict) for left in dcp_rs.clean(dst).kept] == [
            ("conversion", "whole")
        ]
