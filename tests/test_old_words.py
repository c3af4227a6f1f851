"""Words of the last release: they work, and say what they are called now, at the line that has them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_rs
from dcp_rs import RsLoadPlanner
from dcp_rs.errors import PlanError
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support.both import save_rs

W = torch.arange(6.0)


def only_warning(call: Callable[[], Any]) -> tuple[type[Warning], str, str]:
    """The kind, the text and the line of the one warning of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = caught
    lines = Path(warning.filename).read_text().splitlines()
    assert warning.filename == __file__
    return warning.category, str(warning.message), lines[warning.lineno - 1].strip()


def test_paths(tmp_path):
    save_rs({"w": W}, tmp_path / "a")
    kind, said, line = only_warning(
        lambda: dcp_rs.convert(tmp_path / "a", dst=tmp_path / "b")  # here
    )
    assert (kind, said) == (DeprecationWarning, "convert(dst=) is out= now; the old word works for one more release")
    assert line.endswith("# here")
    assert torch.equal(dcp_rs.open(tmp_path / "b")["w"], W)
    with pytest.warns(DeprecationWarning, match=r"index\(src=\) is path= now"):
        dcp_rs.index(src=tmp_path / "b", overwrite=True)
    with pytest.warns(DeprecationWarning, match="now") as warned:
        dcp_rs.convert(src=tmp_path / "a", dst=tmp_path / "c")
    assert len(warned) == 2
    with pytest.raises(TypeError, match="got 'dst' and 'out', which are one argument"):
        dcp_rs.convert(tmp_path / "a", out=tmp_path / "d", dst=tmp_path / "d")


def test_partial_loads(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save_training_state(tmp_path, model, optimizer)
    wider = torch.nn.Sequential()
    wider.add_module("new", torch.nn.Linear(2, 2))
    for parameter, like in zip(model.named_parameters(), wider.parameters(), strict=True):
        wider.register_parameter(parameter[0], torch.nn.Parameter(torch.zeros_like(like)))
    kind, said, line = only_warning(
        lambda: load_training_state(tmp_path, wider, strict=False)  # here
    )
    assert kind is DeprecationWarning
    assert (
        said
        == "load_training_state(strict=False) is allow_partial_load=True now; the old word works for one more release"
    )
    assert line.endswith("# here")
    assert torch.equal(wider.get_parameter("weight"), model.weight)
    with pytest.warns(DeprecationWarning, match="allow_partial_load=False"), pytest.raises(PlanError, match="new"):
        load_training_state(tmp_path, wider, strict=True)
    for options in ({"strict": False}, {"allow_partial_load": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if "allow_partial_load" in options else "ignore")
            load_optim_state_dict(tmp_path, wider, torch.optim.Adam(wider.parameters()), **options)
    with pytest.raises(PlanError):
        load_optim_state_dict(tmp_path, wider, torch.optim.Adam(wider.parameters()))


def test_options_are_where_they_are():
    kind, said, line = only_warning(
        lambda: dcp_rs.ReadOptions(threads=2)  # here
    )
    assert kind is DeprecationWarning
    assert said.startswith("dcp_rs.ReadOptions is dcp_rs.options.ReadOptions now")
    assert line.endswith("# here")
    assert not {"ReadOptions", "WriteOptions"} & {*dcp_rs.__all__, *dir(dcp_rs)}


# --- the direction of rename -----------------------------------------------------------------------


def filled(path, names, rename, **options) -> dict[str, Any]:
    state = {name: torch.full((6,), -1.0) for name in names}
    dcp_rs.load(state, path, planner=RsLoadPlanner(rename=rename, **options))
    return {name: int(value[0]) for name, value in state.items()}


@pytest.fixture
def numbered(tmp_path):
    """Tensors that tell where they come from: `a` is full of 0, `b` of 1, and so on."""

    def save(*names: str) -> Path:
        save_rs({name: torch.full((6,), float(i)) for i, name in enumerate(names)}, tmp_path / "c")
        return tmp_path / "c"

    return save


BACKWARDS = "turn this one around"
BOTH = "has a meaning in the other direction"


@pytest.mark.parametrize(
    ("stored", "wanted", "rename", "got", "said"),
    [
        # From stored names to wanted ones: names, prefixes, functions.
        ("a b", "x b", {"a": "x"}, [0, 1], None),
        ("m.a m.b", "a b", {"m": ""}, [0, 1], None),
        ("a b", "m.a m.b", {"": "m"}, [0, 1], None),
        ("a b", "m.a m.b", lambda name: f"m.{name}", [0, 1], None),
        ("a b", "b a", {"a": "b", "b": "a"}, [0, 1], None),  # one meaning, whichever the direction
        ("a b c", "b c d", {"a": "b", "b": "c", "c": "d"}, [0, 1, 2], None),
        ("m.a n.b", "a n.b", lambda name: name.split(".", 1)[1] if name[0] == "m" else name, [0, 1], None),
        # From wanted names to stored ones, as in the last release.
        ("a b", "x b", {"x": "a"}, [0, 1], BACKWARDS),
        ("m.a m.b", "a b", {"a": "m.a", "b": "m.b"}, [0, 1], BACKWARDS),
        ("m.a m.b", "a b", lambda name: f"m.{name}", [0, 1], BACKWARDS),
        ("a b", "m.a m.b", lambda name: name.removeprefix("m."), [0, 1], BACKWARDS),
        ("a b", "x y", lambda _: "a", [0, 0], BACKWARDS),
        ("a b old", "a b", {"a": "old"}, [2, 1], BACKWARDS),
        # Both: the new direction counts, aloud.
        ("a b c", "a b c", {"a": "b", "b": "c", "c": "a"}, [2, 0, 1], BOTH),
    ],
)
def test_one_direction(stored, wanted, rename, got, said, numbered):
    path = numbered(*stored.split())
    for device in (None, "meta"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = {name: torch.full((6,), -1.0, device=device) for name in wanted.split()}
            planner = RsLoadPlanner(rename=rename)
            dcp_rs.load(state, path, planner=planner)
            assert [int(value[0]) for value in state.values()] == got
            assert [int(planner.resolve_tensor(name)[0]) for name in wanted.split()] == got
        if said is None:
            assert not caught
            continue
        (warning,) = caught
        assert said in str(warning.message)
        assert (warning.category is DeprecationWarning) == (said is BACKWARDS)
        assert warning.filename == __file__


def test_names_that_nothing_or_too_much_is_renamed_to(numbered):
    path = numbered("a", "b")
    with pytest.raises(PlanError, match=r"the checkpoint has no 'a'.*rename= gives no entry this name"):
        filled(path, "xa", {"a": "x"})
    assert filled(path, "xa", {"a": "x"}, allow_partial_load=True) == {"x": 0, "a": -1}
    with pytest.raises(PlanError, match="'a' and 'b' of the checkpoint would both be named 'b'"):
        filled(path, "b", {"a": "b"})
    with pytest.raises(KeyError, match="rename= gives no entry this name"):
        RsLoadPlanner(checkpoint=path, rename={"a": "x"}).resolve_tensor("a")
