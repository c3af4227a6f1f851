"""``merge_fsdp_weights``, which needs no accelerate."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError
from dcp_rs.integrations.accelerate import merge_fsdp_weights


@pytest.mark.parametrize("inside", [".", "merged"])
def test_removal_of_the_written_model_is_refused(tmp_path: Path, inside: str) -> None:
    """The weights went to a folder that was removed next: nothing was left of them."""
    weights = {"a": torch.ones(3), "b.c": torch.zeros(2)}
    folder = tmp_path / "ckpt"
    dcp_rs.save({"model": weights}, folder)
    (tmp_path / "link").symlink_to(folder)
    for named in (folder, tmp_path / "link"):
        with pytest.raises(ValueError, match="remove_checkpoint_dir"):
            merge_fsdp_weights(folder, named / inside, remove_checkpoint_dir=True)
    assert dcp_rs.verify(folder)
    merge_fsdp_weights(folder, folder / inside)
    assert set(load_file(folder / inside / "model.safetensors")) == set(weights)
    merge_fsdp_weights(folder, tmp_path / "merged", remove_checkpoint_dir=True)
    loaded = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert not folder.exists()


def test_a_folder_of_save_state_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """The model.safetensors in it was merged, and all states were removed."""
    folder = tmp_path / "step"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp_rs.save({"model": {"w": torch.ones(2)}}, folder / part)
    save_file({"old": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "random_states_0.pkl").write_bytes(b"states")
    words = r"made by save_state: pass .*pytorch_model_fsdp_0 or .*optimizer_0"
    with pytest.raises(CheckpointNotFoundError, match=words):
        merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True)
    assert len(list(folder.iterdir())) == 4
    assert not (tmp_path / "out").exists()
