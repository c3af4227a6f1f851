"""Checkpoints by number: every element of number n says n, so that a mixture of two saves is seen."""

from pathlib import Path
from typing import Any

import torch

import dcp_rs

#: Elements of the larger tensors: several digest blocks, and direct writes where the file system
#: takes them.
LARGE = 300_000


def rank_state(number: int, rank: int, large: int = LARGE) -> dict[str, Any]:
    """What ``rank`` saves in save ``number``. Shapes change from one save to the next, too."""
    odd = number % 2
    return {
        "common": torch.full((1000 + odd,), float(number)),
        f"of.{rank}.large": torch.full((large + 4096 * odd,), number, dtype=torch.int32),
        f"of.{rank}.odd_length": torch.full((997 + odd,), number % 251, dtype=torch.uint8),
        f"of.{rank}.frozen": torch.arange(2000),  # the same in all saves
        f"of.{rank}.value": {"number": number, "text": "x" * (number % 50)},
    }


def found_number(path: Path | str, ranks: int, large: int = LARGE, **access: Any) -> int:
    """The number of the save that the folder holds, or the prefix of a store.

    Raises:
        AssertionError: it is not exactly one save.
        DcpRsError: it cannot be read.
    """
    with dcp_rs.open(path, verify=True, **access) as checkpoint:
        flat = {name: checkpoint[name] for name in checkpoint}
    number = int(flat["common"][0])
    want: dict[str, Any] = {}
    for rank in range(ranks):
        for name, value in rank_state(number, rank, large).items():
            if isinstance(value, dict):
                want |= {f"{name}.{key}": inner for key, inner in value.items()}
            else:
                want[name] = value
    assert flat.keys() == want.keys(), f"save {number}: {sorted(flat.keys() ^ want.keys())}"
    for name, value in want.items():
        same = (
            torch.equal(flat[name], value)
            if isinstance(value, torch.Tensor)
            else flat[name] == value
        )
        assert same, f"{name} is not that of save {number}"
    return number


def load_number(
    path: Path | str, number: int, ranks: int, large: int = LARGE, **access: Any
) -> None:
    """Loads save ``number`` through the protocol, as training code would."""
    for rank in range(ranks):
        want = rank_state(number, rank, large)
        got = {
            key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else dict.fromkeys(v)
            for key, v in want.items()
        }
        dcp_rs.load(got, path, no_dist=True, verify=True, **access)
        for key, value in want.items():
            assert (
                torch.equal(got[key], value)
                if isinstance(value, torch.Tensor)
                else got[key] == value
            ), key


def stray_files(path: Path) -> list[Path]:
    """What killed saves left behind: files of this package that the index does not name."""
    index = dcp_rs._core.Index.open(str(path), None, False)
    named = {file.name for file in index.files()} | {"index.dcprs", dcp_rs._core.LOCK_NAME}
    return sorted(file for file in path.iterdir() if file.name not in named)
