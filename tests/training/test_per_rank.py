"""``PerRank`` went by the rank among all, and nobody was told when the ranks were others.

Saved at dp 2 and resumed at dp 1, tp 2, the two ranks of a tensor-parallel group went on at
different documents. From 2 to 4 ranks, the new ones began at document 0 while the others went on.
From 4 to 2 with keys, nobody went on with the documents of the other two.
"""

import pytest
import torch
import torch.distributed as dist

from dcp_rs import CheckpointManager
from dcp_rs.errors import PlanError
from dcp_rs.optim import PerRank, RngState, load_training_state, save_training_state, training_state
from support import run_ranks


class Loader:
    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "text": "x", "t": torch.full((1,), 9.0)}

    def load_state_dict(self, state):
        self.at = state["at"]


def model():
    return torch.nn.Linear(1, 1)


def save_at_dp_2(folder):
    rank = dist.get_rank()
    save_training_state(
        f"{folder}/keyed",
        model(),
        (),
        {"loader": PerRank(Loader(10 + 3 * rank), key=rank)},
        fsync=False,
    )
    save_training_state(
        f"{folder}/ranks", model(), (), {"loader": PerRank(Loader(10 + 3 * rank))}, fsync=False
    )


def load_at_tp_2(folder):
    loader = Loader()
    load_training_state(f"{folder}/alone_keyed", model(), (), {"loader": PerRank(loader, key=0)})
    with pytest.raises(
        PlanError,
        match=r"'extra.loader' was saved for 'key0', 'key1', and the ranks that load it are 'key0'. "
        r".*reshard=function",
    ):
        load_training_state(f"{folder}/keyed", model(), (), {"loader": PerRank(Loader(), key=0)})
    return loader.at


def divide(states, key, keys):
    assert sorted(states) == [0, 1]
    assert all(state["text"] == "x" and state["t"].tolist() == [9.0] for state in states.values())
    return {"at": sum(state["at"] for state in states.values()) + keys.index(key)}


def load_with_reshard(folder):
    """Two saved states, and one of them on each rank, or on fewer, or on more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for path, key in ((f"{folder}/keyed", rank), (f"{folder}/ranks", None)):
        loader = Loader()
        load_training_state(path, model(), (), {"loader": PerRank(loader, key=key, reshard=divide)})
        assert loader.at == (10 + 3 * rank if size == 2 else 23 + rank)
    return loader.at


def load_as_saved(folder):
    loader = Loader()
    load_training_state(f"{folder}/ranks", model(), (), {"loader": PerRank(loader)})
    return loader.at


def load_more_than_saved(folder):
    with pytest.raises(
        PlanError,
        match=r"for 'rank0', and the ranks that load it are 'rank0', 'rank1'. .*key=data_parallel_rank",
    ):
        load_training_state(f"{folder}/alone", model(), (), {"loader": PerRank(Loader())})
    with pytest.raises(
        PlanError, match=r"saved for 'key0', and the ranks that load it are 'key0', 'key1'"
    ):
        load_training_state(
            f"{folder}/alone_keyed", model(), (), {"loader": PerRank(Loader(), key=dist.get_rank())}
        )
    module = model()
    before = torch.get_rng_state()
    if dist.get_rank() == 0:
        load_training_state(f"{folder}/alone", module, (), {"rng": RngState()})
    else:
        with pytest.warns(
            UserWarning, match=r"extra\.rng: this rank keeps the random number generators"
        ):
            load_training_state(f"{folder}/alone", module, (), {"rng": RngState()})
        assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_at_dp_2, folder)
    save_training_state(
        folder / "alone",
        model(),
        (),
        {"loader": PerRank(Loader(7)), "rng": RngState()},
        fsync=False,
    )
    save_training_state(
        folder / "alone_keyed", model(), (), {"loader": PerRank(Loader(7), key=0)}, fsync=False
    )
    return folder


def test_tensor_parallel_peers_go_on_at_one_document(saved):
    assert run_ranks(2, load_at_tp_2, saved) == [7, 7]
    assert run_ranks(2, load_as_saved, saved) == [10, 13]


def test_more_ranks_than_saved_are_told(saved):
    run_ranks(2, load_more_than_saved, saved)


def test_fewer_ranks_than_saved_are_told(saved):
    loader = Loader(5)
    with pytest.raises(
        PlanError, match=r"saved for 'rank0', 'rank1', and the ranks that load it are 'rank0'"
    ):
        load_training_state(saved / "ranks", model(), (), {"loader": PerRank(loader)})
    with pytest.raises(PlanError, match=r"saved for 'key0', 'key1', .* are 'key1'"):
        load_training_state(saved / "keyed", model(), (), {"loader": PerRank(loader, key=1)})
    with pytest.raises(PlanError, match=r"saved for 'rank0', 'rank1', and the ranks .* are 'key0'"):
        load_training_state(saved / "ranks", model(), (), {"loader": PerRank(loader, key=0)})
    assert loader.at == 5
    extra = {"loader": PerRank(loader, key=1)}
    load_training_state(saved / "keyed", model(), (), extra, partial=True)
    assert loader.at == 13


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reshard_divides_the_saved_states(saved, ranks):
    run_ranks(ranks, load_with_reshard, saved)


def test_reshard_of_keys_that_are_text(tmp_path):
    save_training_state(tmp_path, model(), (), {"it": PerRank(Loader(7), key="en")}, fsync=False)
    loader, seen = Loader(), []

    def reshard(*arguments):
        seen.append(arguments)
        return {"at": 1}

    extra = {"it": PerRank(loader, key="de", reshard=reshard)}
    load_training_state(tmp_path, model(), (), extra)
    states, key, keys = seen[0]
    assert (key, keys, loader.at) == ("de", ["de"], 1)
    assert states["en"]["at"] == 7


def test_what_was_not_found_is_in_the_report(saved, tmp_path):
    loader = Loader(5)
    options = {"extra": {"loader": PerRank(loader, key=4)}, "partial": True}
    assert load_training_state(saved / "keyed", model(), **options).missing == ["extra.loader.key4"]
    with CheckpointManager(tmp_path) as manager:
        assert manager.report is None
        manager.save(1, training_state(model(), (), {"loader": PerRank(Loader(), key=0)}))
        manager.load_training_state(model(), **options)
        assert manager.report.missing == ["extra.loader.key4"]
        manager.load(model().state_dict(), rename={"model": ""})
        assert manager.report.missing == []
    assert loader.at == 5
