"""What `dcp_rs.save` takes, comes back: types of keys, empty containers, kinds of mappings and their order."""

import io
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from dcp_rs.checkpoint.compare import compare
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.errors import PlanError, UnsafePickleError, UnsupportedError
from support import run_ranks
from support.failures import without_torchs_collection
from support.oracle import raw_bytes
from support.second_reader import SecondReader


def identical(one, other):
    """Whether two trees are the same, with the types and the order of all keys and the kinds of all containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = [[(type(key), key) for key in tree] for tree in (one, other)]
        return keys[0] == keys[1] and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return one == other


def tree():
    return OrderedDict(
        z={},
        a={"empty": {}, "deep": {"er": {}}},
        numbers={5: torch.ones(2), 0: torch.zeros(3), 10: {"w": 1}},
        keys={True: 1, None: 2, 1.5: 3, (1, ("a", None)): 4, "text": 5, -3: 6},
        lists=[{}, torch.ones(1), [{"x": torch.ones(1)}, []], {"y": {}}],
        values={"none": None, "list": [], "tuple": (1, {2: "b"}), "counter": [Counter("ab")]},
        schedule={"milestones": Counter({30: 1, 5: 2}), "last": 3},
        groups=defaultdict(list, {"b": torch.ones(1), "a": 2}),
        strange=defaultdict(lambda: 7, {1: 2}),
        ordered=OrderedDict(b=torch.ones(1), a=OrderedDict()),
        empty_counter=Counter(),
        bytes=io.BytesIO(b"abc"),
    )


def expected():
    """A factory that is no well-known class is not kept."""
    want = tree()
    want["strange"].default_factory = None
    return want


def test_nested_state_comes_back(ckpt):
    dcp_rs.save(tree(), ckpt)
    got = dcp_rs.open(ckpt).state_dict()
    assert identical(got, expected())
    assert got["groups"]["new"] == []
    assert got["strange"].default_factory is None


def test_fqns_are_those_of_dcp(ckpt):
    dcp_rs.save({"extra": {"cfg": {"a": {5: [1, 2]}}}}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert list(checkpoint) == ["extra.cfg.a.5"]
        assert checkpoint["extra.cfg.a.5"] == [1, 2]


def test_nested_state_of_a_background_save_comes_back(ckpt):
    dcp_rs.async_save(tree(), ckpt).result()
    assert identical(dcp_rs.open(ckpt).state_dict(), expected())


def test_a_load_fills_the_callers_own_keys_and_containers(ckpt):
    want = tree()
    dcp_rs.save(want, ckpt)
    got = OrderedDict(
        numbers={5: torch.zeros(2), 0: torch.ones(3), 10: {"w": 0}},
        keys={-3: 0, True: 0, None: 0, 1.5: 0, (1, ("a", None)): 0, "text": 0},
        schedule={"milestones": {30: 0, 5: 0}, "last": 0},
        groups={"b": torch.zeros(1), "a": 0},
        bytes=None,
    )
    containers = {name: got[name] for name in got}
    dcp_rs.load(got, ckpt)
    assert all(got[name] is container for name, container in containers.items() if name != "bytes")
    assert identical(got["numbers"], want["numbers"])
    assert got["keys"] == want["keys"]
    assert list(got["keys"]) == [-3, True, None, 1.5, (1, ("a", None)), "text"]
    assert type(got["schedule"]["milestones"]) is dict
    assert got["schedule"] == {"milestones": {30: 1, 5: 2}, "last": 3}
    assert got["bytes"].getvalue() == b"abc"


def test_numbers_at_the_top_are_loaded(ckpt):
    dcp_rs.save({5: 1, 10: torch.ones(2), "x": 3}, ckpt)
    got = {5: 0, 10: torch.zeros(2), "x": 0}
    dcp_rs.load(got, ckpt)
    assert identical(got, {5: 1, 10: torch.ones(2), "x": 3})


def test_a_load_that_fails_leaves_numbered_values_alone(ckpt):
    dcp_rs.save({"a": {5: 1}}, ckpt)
    got = {"a": {5: 0}, "b": {7: 0}}
    with pytest.raises(PlanError, match=r"b\.7"):
        dcp_rs.load(got, ckpt)
    assert got == {"a": {5: 0}, "b": {7: 0}}


def test_two_keys_of_one_name_are_refused(ckpt):
    with pytest.raises(PlanError, match=r"\['a'\]\[5\] and \['a'\]\['5'\]"):
        dcp_rs.save({"a": {5: 1, "5": 2}}, ckpt)


class Odd:
    def __str__(self):
        return "odd"


@pytest.mark.parametrize("key", [Odd(), b"x", torch.float32], ids=lambda key: type(key).__name__)
def test_a_key_that_cannot_be_kept_is_warned_of_and_loads_all_the_same(ckpt, key):
    with pytest.warns(UserWarning, match="is kept as text"):
        dcp_rs.save({"a": {key: 3}}, ckpt)
    assert dcp_rs.open(ckpt).state_dict() == {"a": {str(key): 3}}
    got = {"a": {key: 0}}
    dcp_rs.load(got, ckpt)
    assert got == {"a": {key: 3}}
    with pytest.raises(UnsupportedError, match="strict_values"):
        dcp_rs.save({"a": {key: 3}}, ckpt, strict_values=True)


@pytest.mark.parametrize("key", [1 << 70, -(1 << 63) - 1, float("inf"), (1 << 64, "a")], ids=str)
def test_a_number_that_cannot_be_kept_is_refused(ckpt, key):
    """It came back as text, and two runs went on with other keys than they had."""
    with pytest.raises(UnsupportedError, match=r"cannot be kept.*64 bits"):
        dcp_rs.save({"a": {key: 3}}, ckpt)
    assert not ckpt.exists() or list(ckpt.glob("index*")) == []


def test_a_mapping_of_another_class_comes_back_as_a_dict(ckpt):
    dcp_rs.save({"a": MappingProxyType({1: MappingProxyType({})})}, ckpt)
    assert identical(dcp_rs.open(ckpt).state_dict(), {"a": {1: {}}})


def test_a_flat_state_dict_costs_nothing(ckpt):
    dcp_rs.save({f"layer.{i}.weight": torch.zeros(0) for i in range(100)}, ckpt)
    assert open_index(ckpt).nesting() == []


def test_names_that_are_left_out_take_their_containers_with_them(ckpt):
    state = {
        "model": OrderedDict(w=torch.ones(1)),
        "optim": {"state": {}, "n": {5: 1}},
        "other": {},
    }
    dcp_rs.save(state, ckpt, include=["model.*", "optim.n*"])
    assert identical(
        dcp_rs.open(ckpt).state_dict(), {"model": state["model"], "optim": {"n": {5: 1}}}
    )
    dcp_rs.save(state, ckpt, exclude="other")
    assert identical(
        dcp_rs.open(ckpt).state_dict(), {"model": state["model"], "optim": state["optim"]}
    )


def test_torchs_planner_saves_as_torch_does(tmp_path):
    state = {"a": {5: 1, "e": {}}, "o": OrderedDict(w=torch.ones(1))}
    dcp.save(dict(state), storage_writer=RsWriter(tmp_path / "rs"), no_dist=True)
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    assert dcp_rs.open(tmp_path / "rs").state_dict() == dcp_rs.open(tmp_path / "stock").state_dict()
    dcp_rs.save(state, tmp_path / "own")
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata().planner_data
    for path in ("rs", "own"):
        assert dict(RsReader(tmp_path / path).read_metadata().planner_data) == stock
    # And is loaded as torch loads it.
    got = {}
    _load_state_dict(
        got,
        storage_reader=RsReader(tmp_path / "own"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert got == {"a": {"5": 1}, "o": {"w": torch.ones(1)}}


def save_different_keys(path):
    rank = dist.get_rank()
    own = {rank: torch.full((2,), rank), "empty": {}} if rank else OrderedDict()
    state = {
        "common": OrderedDict(b=torch.ones(1), a=Counter({7: 1})),
        "own": {f"r{rank}": own},
        "n": {5: rank},
    }
    dcp_rs.save(state, path)


def test_ranks_may_hold_different_keys(ckpt):
    run_ranks(2, save_different_keys, ckpt)
    got = dcp_rs.open(ckpt).state_dict()
    assert identical(got["common"], OrderedDict(b=torch.ones(1), a=Counter({7: 1})))
    assert identical(got["own"]["r0"], OrderedDict())
    assert got["own"]["r1"].keys() == {1, "empty"}
    assert list(got["n"]) == [5]
    SecondReader.open(ckpt)


keys = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.tuples(st.integers(0, 3), st.text("ab", max_size=2)),
)


def mappings(inner):
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.builds(
        lambda kind, items: kind(dict(items)), st.sampled_from([dict, OrderedDict, Counter]), pairs
    )


trees = st.recursive(
    st.just(torch.arange(3)) | st.none() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: mappings(inner) | st.lists(inner, max_size=3),
    max_leaves=10,
)


@given(state=st.builds(dict, st.lists(st.tuples(keys, trees), max_size=4)))
def test_random_trees_come_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("ckpt")
    try:
        dcp_rs.save(state, path, fsync=False)
    except PlanError as error:  # two paths with one name
        assert "flatten to" in str(error)  # noqa: PT017
        return
    assert identical(dcp_rs.open(path).state_dict(), state)
    assert_second_reader_agrees(path, state)


def assert_second_reader_agrees(path, state):
    def leaves(node):
        if isinstance(node, dict):
            return (
                type(node)((key, leaves(value)) for key, value in node.items())
                if not isinstance(node, Counter)
                else Counter({key: leaves(value) for key, value in node.items()})
            )
        return node

    def strip(node, want):
        """The tree of the second reader, whose leaves are bytes, with the leaves of the other where they agree."""
        if isinstance(node, dict):
            made = type(node)()
            for key, value in node.items():
                made[key] = strip(value, want[key])
            return made
        if isinstance(node, list):
            return [strip(value, other) for value, other in zip(node, want, strict=True)]
        if isinstance(want, torch.Tensor):
            assert node == (
                str(want.dtype).removeprefix("torch."),
                tuple(want.shape),
                raw_bytes(want),
            )
        else:
            assert isinstance(node, bytes)
        return want

    assert identical(strip(SecondReader.open(path).state_dict(), state), state)


# --- conversions and comparisons


def test_a_conversion_to_a_file_of_torch_and_back_keeps_all(tmp_path):
    want = tree()
    del want["groups"], want["strange"]
    want["keys"] = {
        True: 1,
        None: 2,
        -3: 3,
        "text": 4,
    }  # a mapping with other keys is one value in such a file
    dcp_rs.save(want, tmp_path / "a")
    dcp_rs.convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    assert identical(torch.load(tmp_path / "b.pt", weights_only=False), want)
    dcp_rs.convert(tmp_path / "b.pt", tmp_path / "c")
    assert identical(dcp_rs.open(tmp_path / "c").state_dict(), want)
    dcp_rs.convert(tmp_path / "c", tmp_path / "d", shards=2)
    assert identical(dcp_rs.open(tmp_path / "d").state_dict(), want)
    assert compare(tmp_path / "a", tmp_path / "d").differences == []


def test_a_defaultdict_goes_into_a_file_of_torch_only_with_leave(tmp_path):
    dcp_rs.save({"a": defaultdict(int, b=1)}, tmp_path / "a")
    with pytest.raises(UnsafePickleError, match="defaultdict"):
        dcp_rs.convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    dcp_rs.convert(tmp_path / "a", tmp_path / "b.pt", to="torch", weights_only=False)
    assert identical(
        torch.load(tmp_path / "b.pt", weights_only=False), {"a": defaultdict(int, b=1)}
    )


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": {5: 1}}, r"'a.5': .*the key 5"),
        ({"a": {"b": {}}, "c": 1}, r"'a.b': .*an empty dict"),
        ({"a": Counter(x=1)}, r"'a': .*a Counter"),
    ],
)
def test_a_conversion_to_dcp_names_what_that_cannot_hold(tmp_path, state, what):
    dcp_rs.save(state, tmp_path / "a")
    with pytest.raises(UnsupportedError, match=what):
        dcp_rs.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    report = dcp_rs.convert(tmp_path / "a", tmp_path / "b", to="dcp", skip_unsupported=True)
    assert len(report.skipped) == 1


def test_the_numbers_of_an_optimizer_pass_through_dcp(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    want = {"optimizer": optimizer.state_dict()}
    dcp_rs.save(want, tmp_path / "a")
    dcp_rs.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert dcp_rs.open(tmp_path / "b").state_dict()["optimizer"]["state"].keys() == {0, 1}


def test_conversion_renames_and_excludes_containers(tmp_path):
    state = {"model": OrderedDict(w=torch.ones(1), e={}), "n": {5: 1}, "gone": {}}
    dcp_rs.save(state, tmp_path / "a")
    dcp_rs.convert(tmp_path / "a", tmp_path / "b", rename={"model": "m"}, exclude="gone")
    assert identical(
        dcp_rs.open(tmp_path / "b").state_dict(), {"m.w": torch.ones(1), "m.e": {}, "n": {5: 1}}
    )


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": {0: 1}}, {"a": {"0": 1}}, ("a.0", "path", "['a'][0]", "['a']['0']")),
        ({"a": {0: 1}}, {"a": {False: 1}}, None),
        ({"a": 0}, {"a": "0"}, ("a", "value", "0", "'0'")),
        ({"a": 1}, {"a": True}, ("a", "value", "1", "True")),
        ({"a": [1, 2]}, {"a": (1, 2)}, ("a", "value", "[1, 2]", "(1, 2)")),
        ({"a": 1, "b": {}}, {"a": 1}, ()),
        ({"a": {"b": 1}}, {"a": Counter(b=1)}, ()),
        ({"a": float("nan")}, {"a": float("nan")}, ()),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, ()),
    ],
)
def test_a_comparison_sees_types(tmp_path, one, other, found):
    dcp_rs.save(one, tmp_path / "a")
    dcp_rs.save(other, tmp_path / "b")
    differences = compare(tmp_path / "a", tmp_path / "b").differences
    if found == ():
        assert differences == []
    elif found is None:
        assert {d.name for d in differences} == {"a.0", "a.False"}
    else:
        assert [(d.name, d.kind, d.a, d.b) for d in differences] == [found]


# --- values


class StatefulDict(dict):
    """A dict that says itself what its state is."""

    def state_dict(self):
        return {"hidden": torch.full((2,), 7.0), "n": {1: 2}}

    def load_state_dict(self, state):
        self.loaded = state


class StatefulList(list):
    state_dict = StatefulDict.state_dict
    load_state_dict = StatefulDict.load_state_dict


@pytest.mark.parametrize("kind", [StatefulDict, StatefulList])
def test_a_dict_or_list_that_is_stateful_is_asked(ckpt, kind):
    dcp_rs.save({"x": kind()}, ckpt)
    assert identical(dcp_rs.open(ckpt).state_dict()["x"], kind().state_dict())
    value = kind()
    dcp_rs.load({"x": value}, ckpt)
    assert identical(value.loaded, kind().state_dict())


def test_an_object_with_the_methods_on_itself_is_stateful(ckpt):
    loaded = []
    value = SimpleNamespace(state_dict=lambda: {"a": 1}, load_state_dict=loaded.append)
    dcp_rs.save({"x": value}, ckpt)
    dcp_rs.load({"x": value}, ckpt)
    assert loaded == [{"a": 1}]


@pytest.mark.parametrize(
    "save",
    [dcp_rs.save, lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True)],
    ids=["own", "stock"],
)
def test_files_in_memory_are_values(tmp_path, save):
    save({"f": io.BytesIO(b"abc"), "w": torch.ones(1)}, tmp_path)
    assert dcp_rs.open(tmp_path)["f"].getvalue() == b"abc"
    got = {"f": io.BytesIO(), "w": torch.zeros(1)}
    dcp_rs.load(got, tmp_path)
    assert got["f"].getvalue() == b"abc"


class Unsafe:
    pass


def by_planner(planner):
    def save(state, path, **options):
        with without_torchs_collection():
            dcp.save(state, storage_writer=RsWriter(path, **options), planner=planner)

    return save


@pytest.mark.parametrize(
    "save", [dcp_rs.save, by_planner(RsSavePlanner()), by_planner(DefaultSavePlanner())]
)
def test_values_that_would_not_load_back_can_be_refused(ckpt, save):
    with pytest.warns(UserWarning, match="'u'"):
        save({"u": Unsafe()}, ckpt)
    with pytest.raises(UnsafePickleError, match=r"'u' .*Unsafe.*strict_values") as caught:
        save({"u": Unsafe()}, ckpt, strict_values=True)
    assert caught.value.tensor == "u"
    save({"u": {1: [None]}, "b": io.BytesIO(b"x")}, ckpt, strict_values=True)


def refuse_on_one_rank(path):
    value = Unsafe() if dist.get_rank() == 1 else 3
    with pytest.raises(UnsafePickleError, match=r"of\.1"):
        dcp_rs.save({f"of.{dist.get_rank()}": value}, path, strict_values=True)


def test_a_value_that_one_rank_refuses_is_refused_on_all(ckpt):
    run_ranks(2, refuse_on_one_rank, ckpt)
    assert not list(ckpt.glob("g*"))


class Finishing(RsLoadPlanner):
    """Works on items."""

    def finish_plan(self, new_plan):
        assert any(item.dest_index.fqn == "empty" for item in new_plan.items)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("planner", [RsLoadPlanner, Finishing])
@pytest.mark.parametrize("by", ["dcp-rs", "torch", "torch, read by torch"])
def test_unflattened_values_fill_empty_containers(ckpt, by, planner):
    """As is all that torch saved before 2.4, where it holds no tensors."""
    saved = {
        "w": torch.ones(2),
        "b": {"x": {"y": 1}},
        "empty": {},
        "list": [{"x": 2}, {}],
        "numbers": {3: "three"},
    }
    writer, reader = {
        "dcp-rs": (RsWriter, RsReader),
        "torch": (dcp.FileSystemWriter, RsReader),
        "torch, read by torch": (dcp.FileSystemWriter, dcp.FileSystemReader),
    }[by]
    whole = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(dict(saved), storage_writer=writer(ckpt), planner=whole, no_dist=True)
    for each in (dcp.DefaultLoadPlanner(), planner()):
        state = {
            "w": torch.zeros(2),
            "b": {"x": {}},
            "empty": {},
            "list": [{}],
            "numbers": OrderedDict(),
        }
        dcp.load(state, storage_reader=reader(ckpt), planner=each, no_dist=True)
        assert identical(state, saved)
