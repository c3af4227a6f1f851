"""The weighted sum of checkpoints, bit for bit as a loop of stock loads and `add_` makes it."""

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import _shards_wrapper

import dcp_rs
from dcp_rs.errors import CorruptDataError, PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME
from support import assert_state_equal, blank, random_tensor
from support.both import load_stock, save_rs, save_stock
from support.files import flip
from support.formats import SOURCES, judge, leftovers, make

FLOATS = [
    dtype for dtype in BY_NAME.values() if dtype.is_floating_point and "float4" not in str(dtype)
]
WEIGHTS = [None, [0.5, 0.3, 0.2], [-1.5, 0.1, 7.0]]

needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch adds without a fused multiply-add here",
)
pytestmark = needs_fma


def summed(tensors, weights=None, dtype=None):
    """As torch does it: the judge."""
    weights = weights or [1 / len(tensors)] * len(tensors)
    wide = (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )
    total = tensors[0].to(wide) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor.to(wide), alpha=weight)
    return total.to(dtype or tensors[0].dtype)


def same_numbers(got, want):
    """Bit for bit, but for NaN, of which there are many."""
    assert got.dtype == want.dtype
    wide = torch.float64 if got.dtype == torch.float64 else torch.float32
    nan = want.to(wide).isnan()
    assert torch.equal(got.to(wide).isnan(), nan)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    assert torch.equal(got.view(kind)[~nan], want.view(kind)[~nan])


def read(path):
    with dcp_rs.open(path) as ckpt:
        return {name: ckpt[name] for name in ckpt}


def three(tmp_path, states, kind="dcp-rs"):
    return [make(kind, state, tmp_path / f"in-{number}") for number, state in enumerate(states)]


def models(dtype=torch.bfloat16):
    """Three models: finite numbers of one size."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed": (37, 16), "model.norm": (16,), "model.scalar": ()}
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for _ in range(3)
    ]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_of_every_dtype_are_those_of_torch(weights, tmp_path: Path) -> None:
    # Random bits: NaN, infinities and subnormal numbers are among them.
    states = [
        {str(dtype): random_tensor((61, 67), dtype, seed=seed) for dtype in FLOATS}
        | {
            "zeros": torch.tensor([0.0, -0.0, -0.0]),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(1.5 + seed),
        }
        for seed in range(3)
    ]
    report = dcp_rs.merge(three(tmp_path, states), tmp_path / "out", weights=weights)
    got = read(tmp_path / "out")
    assert set(got) == set(states[0])
    for name in states[0]:
        same_numbers(got[name], summed([state[name] for state in states], weights))
    assert report.summed == report.written
    assert report.weights == (weights or [1 / 3] * 3)


def test_equal_inputs_are_the_result(tmp_path: Path) -> None:
    # -0.0 became 0.0: a sum began with zero. Each sign has a tensor, long and short, of every dtype.
    state = {
        f"{dtype} {sign} {size}": torch.full((size,), sign, dtype=torch.float32).to(dtype)
        for dtype in FLOATS
        for sign in (0.0, -0.0, -1.5)
        for size in (3, 40_000)
    }
    dcp_rs.merge(three(tmp_path, [state, state]), tmp_path / "out")
    got = read(tmp_path / "out")
    for name, tensor in state.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_every_float8_is_the_number_that_torch_reads(tmp_path: Path) -> None:
    states = [
        {
            str(dtype): torch.arange(256, dtype=torch.uint8).view(dtype)
            for dtype in FLOATS
            if dtype.itemsize == 1
        }
    ]
    dcp_rs.merge(three(tmp_path, states), tmp_path / "out.pt", weights=[1.0])
    for name, tensor in torch.load(tmp_path / "out.pt").items():
        same_numbers(tensor, summed([states[0][name]], [1.0]))


def test_inputs_of_several_dtypes_become_that_of_the_first(tmp_path: Path) -> None:
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    plain = [{"w": models(dtype)[number]["model.embed"]} for number, dtype in enumerate(kinds)]
    double = [{"w": plain[0]["w"]}, {"w": models(torch.float64)[1]["model.embed"]}]
    for states in (plain, double):
        out = tmp_path / f"out-{len(states)}"
        dcp_rs.merge([save(state, out, n) for n, state in enumerate(states)], out)
        same_numbers(read(out)["w"], summed([state["w"] for state in states]))
        dcp_rs.merge(
            [save(state, out, n + 9) for n, state in enumerate(states)], f"{out}.pt", dtype="fp32"
        )
        same_numbers(
            torch.load(f"{out}.pt")["w"],
            summed([state["w"] for state in states], dtype=torch.float32),
        )


def save(state, out, number):
    return make("dcp-rs", state, out.parent / f"{out.name}-in-{number}")


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_inputs_of_any_format_make_a_result_of_any_format(to: str, tmp_path: Path) -> None:
    flat = models()
    paths = [
        make(kind, state, tmp_path / kind)
        for kind, state in zip(["dcp", "torch", "safetensors"], flat, strict=True)
    ]
    report = dcp_rs.merge(paths, tmp_path / "out", to=to, weights=[0.5, 0.3, 0.2])
    # The judge reads the first with stock DCP.
    loaded = [load_stock(blank(flat[0]), paths[0]), *flat[1:]]
    want = {name: summed([state[name] for state in loaded], [0.5, 0.3, 0.2]) for name in flat[0]}
    judge(to, tmp_path / "out", want)
    assert report.bytes == sum(tensor.nbytes for tensor in want.values())
    assert report.files == 1
    assert not leftovers(tmp_path)


def test_inputs_are_sharded_differently_and_the_result_as_the_first(tmp_path: Path) -> None:
    whole = [random_tensor((64, 48), torch.bfloat16, seed) for seed in range(3)]

    def cut(tensor, columns):
        pieces = [tensor[:, :columns].contiguous(), tensor[:, columns:].contiguous()]
        return _shards_wrapper.LocalShardsWrapper(pieces, [(0, 0), (0, columns)])

    save_rs({"w": cut(whole[0], 16)}, tmp_path / "a")
    save_stock({"w": cut(whole[1], 33)}, tmp_path / "b")
    torch.save({"w": whole[2].T.contiguous().T}, tmp_path / "c.pt")  # transposed in the file
    paths = [tmp_path / name for name in ("a", "b", "c.pt")]
    for order, pieces in (
        ((0, 1, 2), [(64, 16), (64, 32)]),
        ((1, 2, 0), [(64, 33), (64, 15)]),
        ((2, 0, 1), [(64, 48)]),
    ):
        out = tmp_path / f"out-{order[0]}"
        dcp_rs.merge([paths[i] for i in order], out, weights=[1, -1, 0.25])
        with dcp_rs.open(out) as ckpt:
            same_numbers(ckpt["w"], summed([whole[i] for i in order], [1, -1, 0.25]))
            assert [chunk.sizes for chunk in ckpt.chunks("w")] == pieces


def test_negated_and_expanded_views_of_torch_save_are_summed_as_what_they_are(
    tmp_path: Path,
) -> None:
    a = {"w": torch._neg_view(torch.arange(6.0)), "e": torch.tensor([1.0, 2.0]).expand(3, 2)}
    b = {"w": torch.arange(6.0) * 3, "e": torch.ones(3, 2)}
    paths = [make("torch", a, tmp_path / "a.pt"), make("torch", b, tmp_path / "b.pt")]
    dcp_rs.merge(paths, tmp_path / "out")
    for name, tensor in read(tmp_path / "out").items():
        same_numbers(tensor, summed([a[name].clone(), b[name]]))


def test_large_tensors_are_summed_in_parts(tmp_path: Path) -> None:
    # Several slabs, which end in the middle of rows.
    states = [{"w": random_tensor((1021, 4243), torch.bfloat16, seed)} for seed in range(2)]
    paths = three(tmp_path, states, "safetensors")
    dcp_rs.merge(paths, tmp_path / "out", max_inflight_bytes=1 << 20, weights=[0.75, 0.5])
    same_numbers(read(tmp_path / "out")["w"], summed([state["w"] for state in states], [0.75, 0.5]))


def pieces(vector, *begins):
    """The vector in pieces, which begin at these places."""
    ends = [*begins[1:], len(vector)]
    parts = [vector[begin:end].clone() for begin, end in zip(begins, ends, strict=True)]
    return _shards_wrapper.LocalShardsWrapper(parts, [(begin,) for begin in begins])


@pytest.mark.parametrize(
    ("dtypes", "verify"),
    [
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), True),
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), False),
        ((torch.float32, torch.bfloat16, torch.float16), True),
        ((torch.bfloat16, torch.float64, torch.float32), True),
        ((torch.float8_e4m3fn, torch.bfloat16, torch.float32), True),
    ],
)
def test_pieces_that_begin_elsewhere_in_each_input_are_summed_in_place(
    dtypes, verify: bool, tmp_path: Path
) -> None:
    """Runs of several blocks, cut where any input begins a piece: there, blocks of the others are hashed as a whole."""
    shape = (1_294_071,)
    whole = [random_tensor(shape, dtype, seed) for seed, dtype in enumerate(dtypes)]
    save_rs({"w": pieces(whole[0], 0, 650_112)}, tmp_path / "a")
    save_stock({"w": pieces(whole[1], 0, 6153, 835_700)}, tmp_path / "b")
    save_rs({"w": pieces(whole[2], 0, 382_983)}, tmp_path / "c")
    paths = [tmp_path / name for name in "abc"]
    for order in ((0, 1, 2), (2, 1, 0)):
        out = tmp_path / f"out-{order[0]}"
        dcp_rs.merge(
            [paths[i] for i in order], out, to="safetensors", weights=[1, -1, 0.25], verify=verify
        )
        same_numbers(read(out)["w"], summed([whole[i] for i in order], [1, -1, 0.25]))


def training(step, *, rng=0):
    linear = torch.nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.fill_(step)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "model": linear.state_dict() | {"seen": torch.tensor(7)},
        "optimizer": optimizer.state_dict(),
        "step": step,
        "rng": torch.full((4,), rng, dtype=torch.uint8),
        "config": {"lr": 0.1},
    }


@pytest.mark.parametrize("source", SOURCES)
def test_the_state_of_optimizers_is_left_out_unless_it_is_included(
    source: str, tmp_path: Path
) -> None:
    states = [training(100), training(100)]
    paths = three(tmp_path, states, source)
    report = dcp_rs.merge(paths, tmp_path / "out", to="dcp-rs")
    kept = {name: value for name, value in states[0].items() if name != "optimizer"}
    kept["model"] = dict(kept["model"]) | {
        name: summed([state["model"][name] for state in states]) for name in ("weight", "bias")
    }
    judge("dcp-rs", tmp_path / "out", kept)
    assert report.left_out
    assert all(name.startswith("optimizer.") for name in report.left_out)
    assert set(report.written) == {
        *("model.weight", "model.bias", "model.seen", "step", "rng", "config.lr"),
    }
    included = dcp_rs.merge(
        paths, tmp_path / "all", include=["model.*", "optimizer.state.*"], conflicts="first"
    )
    assert any(
        name.startswith("optimizer.state.") and name.endswith("exp_avg") for name in included.summed
    )
    assert included.left_out == []


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
def test_excluded_entries_leave_no_empty_containers(to: str, tmp_path: Path) -> None:
    """An empty ``ema`` and optimizer were left, which DCP has no place for."""
    states = [
        {
            "model": OrderedDict(w=torch.full((2,), float(number))),
            "ema": OrderedDict(w=torch.ones(2)),
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        }
        for number in (1, 3)
    ]
    paths = three(tmp_path, states)
    for included, kept in (("model.*", {"model"}), (None, {"model", "ema"})):
        out = tmp_path / f"out-{len(kept)}"
        dcp_rs.merge(paths, out, to=to, include=included)
        with dcp_rs.open(out) as ckpt:
            assert ckpt.state_dict().keys() == kept


def test_conflict_names_its_solutions(tmp_path: Path) -> None:
    a, b = three(tmp_path, [training(100), training(110, rng=1)])
    with pytest.raises(PlanError, match=r"'step'|'rng'") as raised:
        dcp_rs.merge([a, b], tmp_path / "out")
    message = str(raised.value)
    for part in (
        str(a),
        str(b),
        "'rng'",
        "'step'",
        "conflicts='first'",
        "'last'",
        "'drop'",
        "exclude=",
    ):
        assert part in message
    assert raised.value.tensor in ("step", "rng")
    assert not (tmp_path / "out").exists()
    report = dcp_rs.merge([a, b], tmp_path / "out", exclude=["step", "rng"])
    assert report.conflicts == []


@pytest.mark.parametrize(("conflicts", "left"), [("first", 0), ("last", 1), ("drop", None)])
def test_conflicts_are_settled_as_the_caller_says(
    conflicts: str, left: int | None, tmp_path: Path
) -> None:
    states = [training(100), training(110, rng=1)]
    report = dcp_rs.merge(three(tmp_path, states), tmp_path / "out", conflicts=conflicts)
    assert sorted(report.conflicts) == ["rng", "step"]
    got = read(tmp_path / "out")
    if left is None:
        assert "step" not in got
        assert "rng" not in got
    else:
        assert got["step"] == states[left]["step"]
        assert torch.equal(got["rng"], states[left]["rng"])
    assert got["config.lr"] == 0.1
    assert int(got["model.seen"]) == 7
    same_numbers(got["model.weight"], summed([state["model"]["weight"] for state in states]))


def test_last_input_keeps_the_order_of_the_first(tmp_path: Path) -> None:
    paths = [
        make("torch", {"model": {"w": torch.ones(2), "seen": torch.tensor(1)}}, tmp_path / "a.pt"),
        make(
            "safetensors", {"model.w": torch.ones(2), "model.seen": torch.tensor(5)}, tmp_path / "b"
        ),
    ]
    dcp_rs.merge(paths, tmp_path / "out.pt", conflicts="last")
    assert_state_equal(
        torch.load(tmp_path / "out.pt"), {"model": {"w": torch.ones(2), "seen": torch.tensor(5)}}
    )


def test_complex_numbers_have_to_be_equal(tmp_path: Path) -> None:
    a, b = (
        make(
            "torch",
            {"w": torch.ones(2), "rope": torch.full((2,), turn, dtype=torch.complex64)},
            tmp_path / name,
        )
        for name, turn in (("a.pt", 1j), ("b.pt", 2j))
    )
    with pytest.raises(
        PlanError, match=r"'rope' is not the same .* Only floating-point tensors are summed"
    ):
        dcp_rs.merge([a, b], tmp_path / "out")
    dcp_rs.merge([a, a], tmp_path / "same")
    assert torch.equal(read(tmp_path / "same")["rope"], torch.full((2,), 1j))


def test_an_input_that_lacks_an_entry_or_has_another_shape_is_named(tmp_path: Path) -> None:
    first = {"w": torch.ones(2, 3), "v": torch.ones(2)}
    a, b, c = (
        make("dcp-rs", state, tmp_path / name)
        for name, state in (
            ("a", first),
            ("b", {"w": torch.ones(2, 3)}),
            ("c", first | {"w": torch.ones(3, 2)}),
        )
    )
    for paths in ([a, b], [b, a]):
        with pytest.raises(PlanError, match=r"'v': in .*a, but not in .*b; .*exclude="):
            dcp_rs.merge(paths, tmp_path / "out")
    with pytest.raises(PlanError, match=r"'w' has shape \[2, 3\] in .*a, and \[3, 2\] in .*c"):
        dcp_rs.merge([a, c], tmp_path / "out")
    value = make("dcp-rs", first | {"w": 5}, tmp_path / "value")
    with pytest.raises(PlanError, match="'w' is not the same"):
        dcp_rs.merge([a, value], tmp_path / "out")
    assert dcp_rs.merge([a, b], tmp_path / "out", exclude="v").written == ["w"]
    with pytest.raises(PlanError, match=r"nothing is left of the 2 entries of .* by include='x'"):
        dcp_rs.merge([a, c], tmp_path / "none", include="x")


@pytest.mark.parametrize(
    ("weight", "dtype", "scale", "is_decoded"),
    [
        ("w", torch.float8_e4m3fn, "w_scale_inv", True),
        ("w_packed", torch.int32, "w_scale", True),
        ("x.qweight", torch.int32, "x.scales", False),  # GPTQ and AWQ
        ("x.weight", torch.uint8, "x.weight.absmax", False),  # bitsandbytes, 4 bits
        ("x.weight", torch.uint8, "x.weight.nested_absmax", False),
        ("x.weight", torch.int8, "x.SCB", False),  # bitsandbytes, 8 bits
    ],
)
def test_quantized_weights_are_not_summed_apart_from_their_scales(
    weight: str, dtype: torch.dtype, scale: str, is_decoded: bool, tmp_path: Path
) -> None:
    state = {weight: torch.ones(4, 4).to(dtype), scale: torch.ones(4, 1, dtype=torch.bfloat16)}
    paths = three(tmp_path, [state, state], "safetensors")
    message = f"'{weight}' is quantized, with its scales in '{scale}'"
    with pytest.raises(UnsupportedError, match=message) as raised:
        dcp_rs.merge(paths, tmp_path / "out", conflicts="first")
    assert ("dequantize=True" in str(raised.value)) == is_decoded


@pytest.mark.parametrize("inputs", [("plain", "codes"), ("codes", "plain"), ("codes", "codes")])
@pytest.mark.parametrize("options", [{"exclude": "*_scale_inv"}, {"include": "*.weight"}, {}])
def test_scales_that_are_left_out_do_not_make_codes_numbers(
    inputs: tuple[str, str], options: dict[str, str], tmp_path: Path
) -> None:
    """The codes of FP8 were added to weights, as an error for another name advised."""
    codes = torch.full((4, 4), 448.0).to(torch.float8_e4m3fn)
    states = {
        "plain": {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16)},
        "codes": {"a.weight": codes, "a.weight_scale_inv": torch.full((1, 1), 1 / 448)},
    }
    for name, state in states.items():
        make("safetensors", state, tmp_path / name)
    with pytest.raises(UnsupportedError, match=r"'a.weight' is quantized, with its scales in"):
        dcp_rs.merge([tmp_path / name for name in inputs], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_answered_by_what_to_do(tmp_path: Path) -> None:
    a, b = three(tmp_path, models()[:2])
    out = tmp_path / "out"
    for arguments, message in (
        ((a, out), r"inputs='.*': pass a list, as in merge\(\['a', 'b'\], 'out'\)"),
        (([], out), "at least one checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            dcp_rs.merge(*arguments)
    for options, message in (
        ({"weights": [1.0]}, "2 inputs need 2 weights"),
        ({"weights": [1.0, float("nan")]}, "nan is not a finite"),
        ({"weights": [1.0, 1e300]}, "within the range of float32"),
        ({"weights": [True, 1.0]}, "True is not a finite Python or NumPy number"),
        (
            {"conflicts": "ignore"},
            "conflicts='ignore': must be one of 'error', 'first', 'last', 'drop'",
        ),
        ({"dtype": "int8"}, "dtype='int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            dcp_rs.merge([a, b], out, **options)
    with pytest.raises(ValueError, match=r"the destination .* is the source"):
        dcp_rs.merge([a, b], b, overwrite=True)
    assert not out.exists()


def test_tied_weights_and_renamed_ones_are_exported_as_convert_does(tmp_path: Path) -> None:
    paths = []
    for number, state in enumerate(models()[:2]):
        tied = state | {"model.head": state["model.embed"]}
        paths.append(make("torch", tied, tmp_path / f"{number}.pt"))
    report = dcp_rs.merge(paths, tmp_path / "hf", to="safetensors", rename={"model": ""})
    assert report.tied == {"head": "embed"}
    assert sorted(report.written) == ["embed", "norm", "scalar"]
    torch.save(models()[2] | {"model.head": models()[2]["model.embed"] + 1}, tmp_path / "apart.pt")
    untied = dcp_rs.merge([paths[0], tmp_path / "apart.pt"], tmp_path / "untied", to="safetensors")
    assert untied.tied == {}
    assert "model.head" in untied.written


def test_a_result_tells_what_it_was_made_of(tmp_path: Path, dcp_rs_cli) -> None:
    a, b = three(tmp_path, models()[:2])
    dcp_rs.merge([a, b], tmp_path / "out", weights=[1.5, -0.5])
    dcp_rs.merge([a, b], tmp_path / "hf", weights=[1.5, -0.5], to="safetensors")
    with dcp_rs.open(a) as first, dcp_rs.open(b) as second:
        want = [
            {"path": str(a), "save_id": first.save_id, "weight": 1.5},
            {"path": str(b), "save_id": second.save_id, "weight": -0.5},
        ]
    for out in (tmp_path / "out", tmp_path / "hf"):
        assert json.loads(dcp_rs_cli("inspect", out, "--json")[1])["merged_from"] == want
        assert f"-0.5 * {b}, save {want[1]['save_id']}" in dcp_rs_cli("inspect", out)[1]
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as opened:
        assert json.loads(opened.metadata()["dcp_rs.merged_from"]) == want
    # Neither torch's planners nor a conversion trip over the note.
    judge("dcp-rs", tmp_path / "out", read(tmp_path / "out"))
    dcp_rs.convert(tmp_path / "out", tmp_path / "stock", to="dcp")
    judge("dcp", tmp_path / "stock", read(tmp_path / "out"))
    assert json.loads(dcp_rs_cli("inspect", a, "--json")[1])["merged_from"] == []


def test_the_command(tmp_path: Path, dcp_rs_cli) -> None:
    states = [training(step) for step in (100, 110, 120)]
    paths = three(tmp_path, states)
    out = tmp_path / "out"
    command = ["merge", *paths, "-o", out]
    status, _, err = dcp_rs_cli(*command)
    assert (status, "--conflicts 'first'" in err) == (2, True)
    status, _, err = dcp_rs_cli(*command, "--weights", "0.5,x")
    assert (status, "not a list of numbers such as 0.5,0.3,0.2" in err) == (2, True)
    status, said, _ = dcp_rs_cli(*command, "--weights=-1,1,1", "--conflicts", "last", "--json")
    assert status == 0
    assert json.loads(said)["conflicts"] == ["step"]
    assert json.loads(said)["weights"] == [-1, 1, 1]
    got = read(out)
    assert got["step"] == 120
    same_numbers(
        got["model.weight"], summed([state["model"]["weight"] for state in states], [-1, 1, 1])
    )
    status, shown, _ = dcp_rs_cli(*command, "--overwrite", "--include", "model.*")
    assert (status, f"0.333333 * {paths[0]}" in shown, "wrote" in shown) == (0, True, True)


def test_damage_in_an_input_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    a, b = three(tmp_path, models()[:2])
    (data,) = b.glob("*.safetensors")
    flip(data, -3)
    with pytest.raises(CorruptDataError):
        dcp_rs.merge([a, b], tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"in-0", "in-1"}
    dcp_rs.merge([a, b], tmp_path / "out", verify=False)


@pytest.mark.parametrize("first", [0, 1])
def test_damage_in_any_block_is_found(first: int, tmp_path: Path) -> None:
    """Also in one that lies in pieces of another input."""
    whole = random_tensor((1_294_071,), torch.bfloat16, 0)
    save_rs({"w": pieces(whole, 0)}, tmp_path / "a")
    save_rs({"w": pieces(whole, 0, 382_983)}, tmp_path / "b")
    inputs = [tmp_path / "a", tmp_path / "b"]
    for folder in inputs:
        with dcp_rs.open(folder) as ckpt:
            ends = [
                (chunk.file, chunk.offset + at)
                for chunk in ckpt.chunks("w")
                for at in (0, chunk.nbytes - 1)
            ]
            places = [*ends, *((chunk.file, chunk.offset + 700_000) for chunk in ckpt.chunks("w"))]
        for data, place in places:
            flip(folder / data, place, 6)
            with pytest.raises(CorruptDataError, match=str(folder / data)):
                dcp_rs.merge(inputs[first:] + inputs[:first], tmp_path / "out")
            flip(folder / data, place, 6)
    dcp_rs.merge(inputs, tmp_path / "out")


def test_progress_goes_to_the_end(tmp_path: Path) -> None:
    told = []
    paths = three(tmp_path, models())
    report = dcp_rs.merge(
        paths, tmp_path / "out", progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (report.bytes, report.bytes)
    assert all(one <= other for one, other in itertools.pairwise(told))


def test_globs_of_an_iterator_choose_of_every_input(tmp_path):
    states = [{"w": torch.full((3,), float(number)), "v": torch.ones(number)} for number in (1, 3)]
    inputs = [make("dcp-rs", state, tmp_path / str(i)) for i, state in enumerate(states)]
    dcp_rs.merge(inputs, tmp_path / "included", include=iter(["w"]))
    dcp_rs.merge(inputs, tmp_path / "excluded", exclude=(glob for glob in ["v"]))
    for name in ("included", "excluded"):
        assert_state_equal(read(tmp_path / name), {"w": torch.full((3,), 2.0)})
