"""Names of data files that lead out of the folder of their index."""

import struct

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError, CorruptIndexError, DcpRsError, UnsupportedError
from support.failures import SMALL_STATE, outcome, read_whole
from support.forged import INDEX, rebuild, sections_of


def with_name(path, name, *, external=False):
    """The index in `path` with its one data file called `name`."""
    data = (path / INDEX).read_bytes()
    files, tensors, chunks, dims, digests, strings, planner = sections_of(data)
    file = bytearray(files)
    struct.pack_into("<QI", file, 0, len(strings), len(name))
    if external:
        struct.pack_into("<I", file, 12, struct.unpack_from("<I", file, 12)[0] | 1)
    # The names of files and of tensors are counted apart; the old name of the file stays, unused.
    (path / INDEX).write_bytes(
        rebuild(data, [bytes(file), tensors, chunks, dims, digests, strings + name, planner])
    )


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "linked folder", "link within"])
def test_no_name_leads_out_of_the_folder(saved, tmp_path, kind, external):
    (data,) = saved.glob("g*.safetensors")
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / data.name
    if kind == "link within":
        (saved / "kept").mkdir()
        secret = saved / "kept" / "data"
    data.rename(secret)
    name = {
        "absolute": str(secret),
        "parent": f"../outside/{data.name}",
        "link": "link",
        "linked folder": f"folder/{data.name}",
        "link within": "link",
    }[kind]
    if kind.startswith("link") and kind != "linked folder":
        (saved / "link").symlink_to(secret)
    if kind == "linked folder":
        (saved / "folder").symlink_to(outside)
    with_name(saved, name.encode(), external=external)
    allowed = kind == "link within" and external
    if allowed:
        assert outcome(saved) == "right"
    else:
        with pytest.raises((UnsupportedError, CorruptIndexError, CorruptDataError)) as raised:
            read_whole(saved, verify=True)
        if type(raised.value) is UnsupportedError:
            assert "allow_external=True" in str(raised.value)
        target = {"model": {"w": torch.zeros(3, 4)}}
        with pytest.raises(DcpRsError):
            dcp_rs.load(target, saved)
        assert not target["model"]["w"].any()
    if external:
        with dcp_rs.open(saved, allow_external=True) as checkpoint:
            assert torch.equal(checkpoint["model.w"], SMALL_STATE["model"]["w"])


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", ["./x", "kept//x", "kept/./x", "x/", "kept\\x"])
def test_names_are_paths_where_someone_else_wrote_the_file(saved, name, external):
    (data,) = saved.glob("g*.safetensors")
    (saved / "kept").mkdir()
    for copy in ("x", "kept/x", "kept\\x"):
        (saved / copy).hardlink_to(data)
    with_name(saved, name.encode(), external=external)
    expected = (
        "CorruptIndexError" if not external else "CorruptDataError" if name == "x/" else "right"
    )
    assert outcome(saved) == expected


def test_an_index_elsewhere_needs_permission_and_one_beside_does_not(tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    dcp_rs.index(folder)
    assert outcome(folder, {"w": torch.ones(3)}) == "right"
    dcp_rs.index(folder / "model.safetensors", out=tmp_path / "elsewhere")
    with pytest.raises(UnsupportedError, match="allow_external=True"):
        read_whole(tmp_path / "elsewhere", verify=True)
    with dcp_rs.open(tmp_path / "elsewhere", allow_external=True) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.ones(3))


@pytest.mark.parametrize("end", ["", "/../model"])
def test_an_index_for_the_folder_of_the_data_is_one_beside_it(tmp_path, end):
    """It named the data by absolute paths, and the folder opened no more."""
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    dcp_rs.index(folder, out=f"{folder}{end}")
    assert outcome(folder, {"w": torch.ones(3)}) == "right"


def test_a_cache_of_links_opens_without_an_index(tmp_path):
    """As Hugging Face's cache has them: the folder was made by a tool of this machine, not by an index."""
    from safetensors.torch import save_file

    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "0123.safetensors")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123.safetensors")
    assert outcome(tmp_path / "snapshot", {"w": torch.ones(3)}) == "right"
    # An index would make whoever opens the folder ask for `allow_external=True`.
    with pytest.raises(UnsupportedError, match="out="):
        dcp_rs.index(tmp_path / "snapshot")
    assert outcome(tmp_path / "snapshot", {"w": torch.ones(3)}) == "right"
