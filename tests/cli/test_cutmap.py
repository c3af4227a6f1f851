"""The map that is drawn of how a tensor is cut."""

from pathlib import Path

from dcp_rs.cli import cutmap
from support import random_tensor, run_ranks


def _save_grid(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from dcp_rs import save

    mesh = init_device_mesh("cpu", (2, 2))
    save({"w": distribute_tensor(random_tensor((8, 6)), mesh, [Shard(0), Shard(1)])}, path)


def test_a_cut_is_drawn(dcp_rs_cli, tmp_path: Path) -> None:
    run_ranks(4, _save_grid, str(tmp_path / "ckpt"))
    status, out, _ = dcp_rs_cli("inspect", tmp_path / "ckpt", "w")
    assert status == 0
    assert out.count("│000111│") == 4
    assert out.count("│222333│") == 4
    assert "-r00003-f00000.safetensors" in out


def cells(lines: list[str]) -> list[str]:
    return [line.split("│")[1] for line in lines if "│" in line]


def test_maps_of_any_shape() -> None:
    drawn = cutmap.draw((100,), [(0, (0,), (60,)), (5, (70,), (30,))], width=10)
    assert drawn == [
        "        dim 0: 0 … 99",
        "       ┌──────────┐",
        "       │000000·111│",
        "       └──────────┘",
    ]
    assert cells(cutmap.draw((), [(3, (), ())])) == ["0"]
    drawn = cutmap.draw(
        (4, 2, 6, 2), [(i, (0, 0, i, 0), (4, 2, 1, 2)) for i in range(6)], width=8, height=8
    )
    assert drawn[:3] == ["        dim 3: 0 … 1", " dim 2 ┌──┐", "     0 │00│"]
    assert cells(drawn) == ["00", "11", "22", "33", "44", "55"]
    eight = [
        (4 * i + 2 * j + k, (i, j, k), (1, 1, 1))
        for i in range(2)
        for j in range(2)
        for k in range(2)
    ]
    drawn = cutmap.draw((2, 2, 2), eight)
    assert cells(drawn) == ["02", "46"]
    assert drawn[-1] == "also cut along dim 2; drawn at its index 0"
    many = cutmap.draw((1000, 8), [(i, (i, 0), (1, 8)) for i in range(1000)], height=16)
    assert len(cells(many)) == 16
