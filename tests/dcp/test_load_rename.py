"""``rename=`` of a load goes one way: from stored names to the names of the state dict."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError
from support.both import save_rs


def filled(path, names, rename, **options) -> list[int]:
    """Load the names, and return the number in each tensor."""
    state = {name: torch.full((6,), -1.0) for name in names}
    dcp_rs.load(state, path, rename=rename, **options)
    return [int(value[0]) for value in state.values()]


@pytest.fixture
def numbered(tmp_path) -> Callable[..., Path]:
    """Tensors that tell where they come from: `a` is full of 0, `b` of 1, and so on."""

    def save(*names: str) -> Path:
        save_rs({name: torch.full((6,), float(i)) for i, name in enumerate(names)}, tmp_path / "c")
        return tmp_path / "c"

    return save


@pytest.mark.parametrize(
    ("stored", "wanted", "rename", "got"),
    [
        ("a b", "x b", {"a": "x"}, [0, 1]),
        ("m.a m.b", "a b", {"m": ""}, [0, 1]),
        ("a b", "m.a m.b", {"": "m"}, [0, 1]),
        ("a b", "m.a m.b", lambda name: f"m.{name}", [0, 1]),
        ("a b", "b a", {"a": "b", "b": "a"}, [0, 1]),
        ("a b c", "b c d", {"a": "b", "b": "c", "c": "d"}, [0, 1, 2]),
        ("a b c", "a b c", {"a": "b", "b": "c", "c": "a"}, [2, 0, 1]),
        (
            "m.a n.b",
            "a n.b",
            lambda name: name.split(".", 1)[1] if name[0] == "m" else name,
            [0, 1],
        ),
    ],
)
def test_from_stored_names_to_wanted_ones(stored, wanted, rename, got, numbered):
    path = numbered(*stored.split())
    names = wanted.split()
    assert filled(path, names, rename) == got
    on_meta = {name: torch.full((6,), -1.0, device="meta") for name in names}
    planner = RsLoadPlanner(rename=rename)
    dcp_rs.load_state_dict(on_meta, RsReader(path), planner=planner)
    assert [int(value[0]) for value in on_meta.values()] == got
    assert [int(planner.resolve_tensor(name)[0]) for name in names] == got


@pytest.mark.parametrize(
    "rename", [{"x": "a"}, {"x": "a", "b": "b"}, lambda name: name.removeprefix("x.")]
)
def test_the_other_way_is_refused(rename, numbered):
    with pytest.raises(
        PlanError, match=r"the checkpoint has no 'x'.*rename= gives this name to no entry"
    ):
        filled(numbered("a", "b"), "xb", rename)


def test_names_that_nothing_or_too_much_is_renamed_to(numbered):
    path = numbered("a", "b")
    with pytest.raises(
        PlanError, match=r"the checkpoint has no 'a'.*rename= gives this name to no entry"
    ):
        filled(path, "xa", {"a": "x"})
    assert filled(path, "xa", {"a": "x"}, allow_partial_load=True) == [0, -1]
    with pytest.raises(PlanError, match="'a' and 'b' of the checkpoint would both be named 'b'"):
        filled(path, "b", {"a": "b"})
    with pytest.raises(KeyError, match="rename= gives this name to no entry"):
        RsLoadPlanner(checkpoint=path, rename={"a": "x"}).resolve_tensor("a")
