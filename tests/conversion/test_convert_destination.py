"""Where a conversion may write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import CheckpointExistsError
from support.formats import judge, leftovers, make


def test_existing_destination_is_kept(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "src")
    make("dcp", {"old": torch.ones(3)}, tmp_path / "dst")
    with pytest.raises(CheckpointExistsError, match="exists"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst")
    judge("dcp", tmp_path / "dst", {"old": torch.ones(3)})
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    (tmp_path / "dst" / "notes.txt").unlink()
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    judge("dcp-rs", tmp_path / "dst", {"w": torch.ones(3)})
    (tmp_path / "empty").mkdir()
    dcp_rs.convert(tmp_path / "src", tmp_path / "empty", to="dcp")
    (tmp_path / "file.pt").write_text("old")
    dcp_rs.convert(tmp_path / "src", tmp_path / "file.pt", to="torch", overwrite=True)
    judge("torch", tmp_path / "file.pt", {"w": torch.ones(3)})
    assert not leftovers(tmp_path)


def test_the_source_is_never_the_destination(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "outer" / "src")
    src = tmp_path / "outer" / "src"
    (tmp_path / "link").symlink_to(src)
    data = next(src.glob("*.safetensors"))
    for dst, to in [
        (src, "dcp"),
        (tmp_path / "outer", "dcp"),
        (tmp_path / "link", "dcp"),
        (data, "safetensors"),
    ]:
        with pytest.raises(ValueError, match="is the source"):
            dcp_rs.convert(src, dst, to=to, overwrite=True)
    judge("dcp-rs", src, {"w": torch.ones(3)})


def links_to_files(tmp_path: Path) -> tuple[Path, Path]:
    real, src = make("safetensors", W, tmp_path / "real"), tmp_path / "src"
    src.mkdir()
    (src / "model.safetensors").symlink_to("../real/model.safetensors")
    return src, real


def links_to_links(tmp_path: Path) -> tuple[Path, Path]:
    middle, _ = links_to_files(tmp_path)
    src = tmp_path / "first"
    src.mkdir()
    (src / "model.safetensors").symlink_to(middle / "model.safetensors")
    return src, middle


def a_link_in_the_destination(tmp_path: Path) -> tuple[Path, Path]:
    middle, _ = links_to_files(tmp_path)
    return middle / "model.safetensors", middle


def data_behind_an_index(tmp_path: Path) -> tuple[Path, Path]:
    real = make("safetensors", W, tmp_path / "real")
    dcp_rs.index(real, out=tmp_path / "src")
    return tmp_path / "src", real


def an_index_behind_a_link(tmp_path: Path) -> tuple[Path, Path]:
    src, real = make("dcp-rs", W, tmp_path / "src"), tmp_path / "real"
    real.mkdir()
    (src / "index.dcprs").rename(real / "index.dcprs")
    (src / "index.dcprs").symlink_to("../real/index.dcprs")
    return src, real


def data_of_torch(tmp_path: Path) -> tuple[Path, Path]:
    src, real = make("dcp", W, tmp_path / "src"), tmp_path / "real"
    real.mkdir()
    for file in src.glob("*.distcp"):
        file.rename(real / file.name)
        file.symlink_to(real / file.name)
    return src, real


W = {"a": torch.ones(3), "b": torch.zeros(2)}


@pytest.mark.parametrize(
    "lay",
    [
        links_to_files,
        links_to_links,
        a_link_in_the_destination,
        data_behind_an_index,
        an_index_behind_a_link,
        data_of_torch,
    ],
)
def test_data_of_the_source_that_is_elsewhere_is_not_replaced(
    tmp_path: Path, lay: Callable[[Path], tuple[Path, Path]]
) -> None:
    """What was not wanted of the source was gone: its folder was looked at, and not where its files are."""
    src, dst = lay(tmp_path)
    for to in ("dcp-rs", "dcp", "safetensors"):
        with pytest.raises(ValueError, match="is the source"):
            dcp_rs.convert(src, dst, to=to, include="a", overwrite=True, allow_external=True)
    with dcp_rs.open(src, allow_external=True) as found:
        assert torch.equal(found["b"], W["b"])
    assert not leftovers(tmp_path)
    dcp_rs.convert(src, tmp_path / "elsewhere", allow_external=True)
    judge("dcp-rs", tmp_path / "elsewhere", W)


def test_a_folder_that_is_mounted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths have nothing in common: it is told by what the system calls it."""
    src = make("dcp-rs", W, tmp_path / "src")
    other = make("dcp", W, tmp_path / "other")
    true_stat = Path.stat

    def stat(path: Path, **how: bool) -> os.stat_result:
        return true_stat(src if path == other else path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ValueError, match="is the source"):
        dcp_rs.convert(src, other, include="a", overwrite=True)


def test_a_hard_link_is_replaced_and_the_source_stays(tmp_path: Path) -> None:
    src = make("torch", W, tmp_path / "src.pt")
    (tmp_path / "out.pt").hardlink_to(src)
    dcp_rs.convert(src, tmp_path / "out.pt", include="a", overwrite=True)
    judge("torch", src, W)
    judge("torch", tmp_path / "out.pt", {"a": W["a"]})


def several(folder: Path) -> str:
    folder.mkdir()
    for name in ("one", "two"):
        save_file(W, folder / f"{name}.safetensors")
    return "several models"


def a_model_and_another(folder: Path) -> str:
    make("safetensors", W, folder)
    save_file(W, folder / "adapter_model.safetensors")
    return "adapter_model.safetensors"


def a_save_and_a_model(folder: Path) -> str:
    make("dcp-rs", W, folder)
    save_file(W, folder / "model.safetensors")
    return "model.safetensors"


def two_saves(folder: Path) -> str:
    make("dcp", W, folder)
    make("dcp-rs", W, folder)
    return r"\.metadata"


def two_saves_of_which_one_does_not_open(folder: Path) -> str:
    """It counted as one damaged checkpoint: torch's, which was whole, went with it."""
    two_saves(folder)
    (folder / "index.dcprs").write_bytes(b"damaged")
    return r"\.metadata"


def text(folder: Path) -> str:
    folder.mkdir()
    (folder / "notes.safetensors").write_text("mine")
    return r"does not open as one checkpoint.*notes\.safetensors"


def text_of_torch(folder: Path) -> str:
    make("dcp", W, folder)
    (folder / "notes.distcp").write_text("mine")
    return "notes.distcp"


def a_folder_of_such_a_name(folder: Path) -> str:
    make("dcp-rs", W, folder)
    (folder / "old.safetensors").mkdir()
    return "old.safetensors"


def a_foreign_index(folder: Path) -> str:
    (folder / "other.safetensors.index.json").write_text(
        '{"weight_map": {"x": "other.safetensors"}}'
    )
    return "other.safetensors.index.json"


def an_index_of_another(folder: Path) -> str:
    a_series(folder)
    return a_foreign_index(folder)


def a_save_and_an_index_of_another(folder: Path) -> str:
    return a_foreign_index(make("dcp-rs", W, folder))


def torchs_and_an_index_of_another(folder: Path) -> str:
    return a_foreign_index(make("dcp", W, folder))


def a_model_and_an_index_of_another(folder: Path) -> str:
    return a_foreign_index(make("safetensors", W, folder))


def torchs_and_an_index_whose_data_are_gone(folder: Path) -> str:
    make("dcp", W, folder)
    an_index_and_no_data(folder)
    return r"\.metadata"


def names_that_only_end_so(folder: Path) -> str:
    make("dcp", W, folder)
    (folder / "my.metadata").write_text("mine")
    return "my.metadata"


@pytest.mark.parametrize(
    "lay",
    [
        several,
        a_model_and_another,
        a_save_and_a_model,
        two_saves,
        two_saves_of_which_one_does_not_open,
        text,
        text_of_torch,
        a_folder_of_such_a_name,
        an_index_of_another,
        a_save_and_an_index_of_another,
        torchs_and_an_index_of_another,
        a_model_and_an_index_of_another,
        torchs_and_an_index_whose_data_are_gone,
        names_that_only_end_so,
    ],
)
def test_a_folder_that_holds_more_than_one_checkpoint_is_not_replaced(
    tmp_path: Path, lay: Callable[[Path], str]
) -> None:
    """All that ended in .safetensors was replaced: several models, and a text."""
    src, dst = make("torch", {"x": torch.ones(1)}, tmp_path / "src.pt"), tmp_path / "dst"
    named = lay(dst)
    before = {file.name: file.read_bytes() for file in dst.iterdir() if file.is_file()}
    with pytest.raises(CheckpointExistsError, match=named):
        dcp_rs.convert(src, dst, overwrite=True)
    assert {file.name: file.read_bytes() for file in dst.iterdir() if file.is_file()} == before
    assert not leftovers(tmp_path)


def a_series(folder: Path) -> None:
    dcp_rs.convert(make("torch", W, folder.with_suffix(".pt")), folder, to="safetensors", shards=2)
    assert len(list(folder.iterdir())) == 3


def a_series_with_two_indexes(folder: Path) -> None:
    a_series(folder)
    (index,) = folder.glob("*.json")
    (folder / "again.safetensors.index.json").write_bytes(index.read_bytes())


def an_indexed_series(folder: Path) -> None:
    a_series(folder)
    dcp_rs.index(folder)


def an_index_over_torch(folder: Path) -> None:
    make("dcp", W, folder)
    dcp_rs.index(folder)


def without_its_index(folder: Path) -> None:
    make("dcp-rs", W, folder)
    (folder / "index.dcprs").unlink()


def with_a_damaged_index(folder: Path) -> None:
    make("dcp-rs", W, folder)
    (folder / "index.dcprs").write_bytes(b"damaged")


def an_index_and_no_data(folder: Path) -> None:
    make("dcp-rs", W, folder)
    next(folder.glob("*.safetensors")).unlink()


def torch_without_metadata(folder: Path) -> None:
    make("dcp", W, folder)
    (folder / ".metadata").unlink()


def torch_with_damaged_metadata(folder: Path) -> None:
    make("dcp", W, folder)
    (folder / ".metadata").write_bytes(b"damaged")


def of_one_rank(folder: Path) -> None:
    make("dcp-rs", W, folder)
    (folder / "index.dcprs").rename(folder / "__0.index.dcprs")


@pytest.mark.parametrize(
    "lay",
    [
        a_series,
        a_series_with_two_indexes,
        an_indexed_series,
        an_index_over_torch,
        without_its_index,
        with_a_damaged_index,
        an_index_and_no_data,
        torch_without_metadata,
        torch_with_damaged_metadata,
        of_one_rank,
    ],
)
def test_one_checkpoint_is_replaced_and_be_it_damaged(
    tmp_path: Path, lay: Callable[[Path], None]
) -> None:
    dst = tmp_path / "dst"
    lay(dst)
    dcp_rs.convert(make("torch", W, tmp_path / "src.pt"), dst, overwrite=True)
    judge("dcp-rs", dst, W)
