"""Layout views: joined, cut and turned tensors, by every way in."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import dcp_rs
from dcp_rs import Concat, Split, Stack, Transpose, Unstack
from support import quantized
from support.quantized import same

LAYERS, EXPERTS = 2, 11


def experts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{layer}.experts.{expert}.{name}": torch.randn(shape, generator=generator)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))
    }
    return {**tensors, "norm": torch.randn(4, generator=generator)}


VIEWS = [
    Stack("layers.{layer}.experts.{expert}.gate", into="layers.{layer}.gates"),
    Stack("layers.{layer}.experts.{expert}.up", into="layers.{layer}.ups"),
    Concat(["layers.{layer}.gates", "layers.{layer}.ups"], into="layers.{layer}.gate_up", dim=1),
    Stack("layers.{layer}.experts.{expert}.down", into="layers.{layer}.down", dim=-1),
    Transpose("layers.{layer}.down", (2, 1, 0)),
]


def fused(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {"norm": stored["norm"]}
    for layer in range(LAYERS):
        gate, up, down = (
            [stored[f"layers.{layer}.experts.{expert}.{name}"] for expert in range(EXPERTS)]
            for name in ("gate", "up", "down")
        )
        made[f"layers.{layer}.gate_up"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        made[f"layers.{layer}.down"] = torch.stack(down, -1).permute(2, 1, 0)
    return made


def stored_as(kind: str, tensors: dict[str, torch.Tensor], path: Path) -> Path:
    if kind == "safetensors":
        return quantized.write(path, tensors, files=2)
    if kind == "torch":
        path.mkdir()
        torch.save(tensors, path / "pytorch_model.bin")
        return path
    dcp_rs.save(tensors, path)
    return path


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", ["safetensors", "dcp-rs", "torch"])
def test_every_way_in(tmp_path, kind):
    expected = fused(experts())
    path = stored_as(kind, experts(), tmp_path / "ckpt")
    verify = kind == "dcp-rs"
    checkpoint = dcp_rs.open(path, views=VIEWS, verify=verify)
    assert_same(dict(checkpoint), expected)
    assert_same(dict(checkpoint.stream()), expected)
    assert_same(checkpoint.state_dict(), expected)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp_rs.load(state, path, views=VIEWS, verify=verify)
    assert_same(state, expected)
    state = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp_rs.RsReader(path, views=VIEWS))
    assert_same(state, expected)
    dcp_rs.convert(path, tmp_path / "out", views=VIEWS)
    assert_same(dict(dcp_rs.open(tmp_path / "out")), expected)


BACK = [
    Transpose("layers.{layer}.down", [2, 1, 0]),
    Split("layers.{layer}.gate_up", into=["layers.{layer}.gates", "layers.{layer}.ups"], dim=1),
    Unstack("layers.{layer}.gates", into="layers.{layer}.experts.{expert}.gate"),
    Unstack("layers.{layer}.ups", into="layers.{layer}.experts.{expert}.up"),
    Unstack("layers.{layer}.down", into="layers.{layer}.experts.{expert}.down", dim=2),
]


@pytest.mark.parametrize("kind", ["safetensors", "dcp-rs", "torch"])
def test_and_back(tmp_path, kind):
    path = stored_as(kind, fused(experts()), tmp_path / "fused")
    checkpoint = dcp_rs.open(path, views=BACK, verify=kind == "dcp-rs")
    assert_same(dict(checkpoint), experts())
    dcp_rs.convert(path, tmp_path / "out", to="safetensors", views=BACK)
    assert_same(dict(dcp_rs.open(tmp_path / "out")), experts())
    both = dcp_rs.open(stored_as("dcp-rs", experts(), tmp_path / "single"), views=VIEWS + BACK)
    assert_same(dict(both), experts())


@pytest.mark.parametrize("to", ["dcp-rs", "safetensors", "dcp"])
def test_parts_without_elements_are_written(tmp_path, to):
    """They had no chunk, so that a conversion left them out and its report named them."""
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 2)}, tmp_path / "model.safetensors"
    )
    views = [
        Split("a", into=["a.first", "a.rest"], sizes=[0, 2]),
        Unstack("b", into="b.{n}", dim=1),
    ]
    expected = {"a.first": torch.zeros(0, 3), "a.rest": torch.arange(6.0).view(2, 3)}
    expected |= {"b.0": torch.zeros(0), "b.1": torch.zeros(0)}
    dcp_rs.convert(tmp_path / "model.safetensors", tmp_path / "out", to=to, views=views)
    assert_same(dict(dcp_rs.open(tmp_path / "out")), expected)
    dcp_rs.merge([tmp_path / "model.safetensors"], tmp_path / "merged", to=to, views=views)
    assert_same(dict(dcp_rs.open(tmp_path / "merged")), expected)


def test_damage_to_a_part_is_found(tmp_path):
    """Digests are over what is stored: a part of it that is an entry of its own is checked with them."""
    dcp_rs.save({"w": torch.zeros(4, 100_000)}, tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    views = Unstack("w", into="w.{row}")
    checkpoint = dcp_rs.open(tmp_path / "ckpt", views=views, verify=True)
    with pytest.raises(dcp_rs.errors.CorruptDataError):
        checkpoint["w.3"]
    state = {"w.3": torch.zeros(100_000)}
    with pytest.raises(dcp_rs.errors.CorruptDataError):
        dcp_rs.load(state, tmp_path / "ckpt", views=views, verify=True)
    assert torch.equal(checkpoint["w.0"], torch.zeros(100_000))


@given(data=st.data())
def test_a_slice_of_a_view_is_the_slice_of_the_whole(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "sliced"
    if not path.exists():
        stored_as("dcp-rs", experts(), path)
    name, whole = data.draw(
        st.sampled_from(sorted(fused(experts()).items(), key=lambda item: item[0]))
    )
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in whole.shape]
    region = tuple(slice(begin, end) for begin, end in bounds)
    assert torch.equal(dcp_rs.open(path, views=VIEWS).get_slice(name)[region], whole[region])


def test_views_of_quantized_weights(tmp_path):
    """Views come after the dequantization, and names are changed after both."""
    made = [quantized.fp8(f"experts.{i}.w", 130, 70, seed=i) for i in range(3)]
    quantized.write(
        tmp_path / "q", {name: tensor for stored, _ in made for name, tensor in stored.items()}
    )
    whole = torch.stack([tensor for _, tensor in made]).bfloat16()
    views = [
        Stack("experts.{i}.w.weight", into="experts.w", dim=1),
        Transpose("experts.w", (1, 2, 0)),
    ]
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=True, views=views)
    assert same(checkpoint["experts.w"], whole.permute(0, 2, 1))
    assert same(
        checkpoint.get_slice("experts.w")[1:, 5:9, 128:], whole.permute(0, 2, 1)[1:, 5:9, 128:]
    )
    state = {"w": torch.zeros(3, 70, 130, dtype=torch.bfloat16)}
    dcp_rs.load(state, tmp_path / "q", dequantize=True, views=views, rename={"experts": ""})
    assert same(state["w"], whole.permute(0, 2, 1))
    parts = [*views, Split("experts.w", into=["left", "right"], dim=2, sizes=[30, 100])]
    assert same(
        dcp_rs.open(tmp_path / "q", dequantize=True, views=parts)["right"],
        whole.permute(0, 2, 1)[:, :, 30:],
    )


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (
            Stack("layers.{layer}.expert.{expert}.gate", into="layers.{layer}.g"),
            "no tensor matches",
        ),
        (
            Stack("layers.{layer}.experts.{expert}.{name}", into="layers.{layer}"),
            "the same fields, or one more",
        ),
        (
            Stack("layers.{layer}.experts.{expert}.gate", into="{depth}.g"),
            "the same fields, or one more",
        ),
        (
            Stack("layers.{layer}.{name}.{expert}.gate", into="layers.{layer}.{expert}.g"),
            "is not a number",
        ),
        (
            Stack("layers.{layer}.experts.{expert}.gate", into="norm"),
            "the same fields, or one more",
        ),
        (Stack("layers.{layer}.experts.0.gate", into="norm"), "two of this name"),
        ([VIEWS[0], Stack(VIEWS[1].pattern, into=VIEWS[0].into)], "layers.0.gates"),
        (
            Concat(
                ["layers.{layer}.experts.0.gate", "layers.{layer}.experts.0.down"], into="{layer}"
            ),
            "cannot be joined",
        ),
        (Split("norm", into=["a", "b"], sizes=[1, 2]), "are not sizes"),
        (Split("norm", into=["a", "b", "c"]), "are not sizes"),
        (Split("norm", into=["{a}", "b"]), "in no name"),
        (Split("norm", into="ab"), "not a list of names"),
        (Split("norm", into=[]), "not a list of names"),
        (Concat([], into="norm"), "no names to join"),
        (Unstack("norm", into="norm.x"), "one field more"),
        (Unstack("norm", into="norm.{i}", dim=1), "no dim 1"),
        (Transpose("norm", (1, 0)), "no dim 1"),
        (Transpose("layers.{layer}.experts.0.gate", (0, 0)), "not a permutation"),
    ],
)
def test_views_that_do_not_fit_are_refused(tmp_path, views, message):
    dcp_rs.save(experts(), tmp_path / "ckpt")
    with pytest.raises(dcp_rs.errors.PlanError, match=message):
        dcp_rs.open(tmp_path / "ckpt", views=views)


def test_unknown_fields_are_named_in_order(tmp_path):
    dcp_rs.save(experts(), tmp_path / "ckpt")
    views = Split("norm", into=["{b}.{c}.{a}", "d"])
    with pytest.raises(dcp_rs.errors.PlanError, match=r"\['a', 'b', 'c'\] are in no name"):
        dcp_rs.open(tmp_path / "ckpt", views=views)


def test_a_field_that_is_repeated_has_one_value(tmp_path):
    names = ["l.0.e.0.0.w", "l.0.e.0.1.w", "l.0.e.1.0.w"]
    dcp_rs.save({name: torch.full((2,), float(i)) for i, name in enumerate(names)}, tmp_path / "c")
    views = Stack("l.{n}.e.{n}.{k}.w", into="l.{n}.w")
    with dcp_rs.open(tmp_path / "c", views=views) as checkpoint:
        assert sorted(checkpoint) == ["l.0.e.1.0.w", "l.0.w"]
        assert checkpoint["l.0.w"].tolist() == [[0, 0], [1, 1]]


def test_a_number_of_thousands_of_digits_joins_nothing(tmp_path):
    torch.save({f"w.{'1' * 5000}": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(dcp_rs.errors.PlanError, match="is not a number to join over"):
        dcp_rs.open(tmp_path / "x.pt", views=Stack("w.{i}", into="w"))


def test_a_gap_in_the_numbers_is_an_error(tmp_path):
    tensors = experts()
    del tensors["layers.1.experts.4.gate"]
    dcp_rs.save(tensors, tmp_path / "ckpt")
    with pytest.raises(dcp_rs.errors.PlanError, match=r"'layers\.1\.gates' lacks a part.* no 4"):
        dcp_rs.open(tmp_path / "ckpt", views=VIEWS)


def test_only_views_are_views(tmp_path):
    with pytest.raises(TypeError, match="Stack"):
        dcp_rs.open(tmp_path, views=["w"])


def moe(kind: str) -> dict[str, torch.Tensor]:
    mlp, names = {
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    }[kind]
    generator = torch.Generator().manual_seed(1)
    shapes = dict(zip(names, ((6, 4), (6, 4), (4, 6)), strict=True))
    tensors = {
        f"model.layers.{layer}.{mlp}.experts.{expert}.{name}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(2)
        for expert in range(3)
        for name, shape in shapes.items()
    }
    return {
        **tensors,
        f"model.layers.0.{mlp}.gate.weight": torch.randn(3, 4),
        "model.norm.weight": torch.randn(4),
    }


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_views_for_models_of_transformers(tmp_path, kind):
    tensors = moe(kind)
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(f'{{"model_type": "{kind}", "num_experts": 3}}')
    views = dcp_rs.views_for(tmp_path / "hf")
    checkpoint = dcp_rs.open(tmp_path / "hf", views=views)
    assert sorted(checkpoint) == [
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.norm.weight",
    ]
    mlp, gate, up = (
        ("mlp", "gate_proj", "up_proj") if kind == "qwen3_moe" else ("block_sparse_moe", "w1", "w3")
    )
    both = [
        torch.cat(
            [tensors[f"model.layers.1.{mlp}.experts.{expert}.{name}.weight"] for name in (gate, up)]
        )
        for expert in range(3)
    ]
    assert torch.equal(checkpoint["model.layers.1.mlp.experts.gate_up_proj"], torch.stack(both))
    dcp_rs.convert(tmp_path / "hf", tmp_path / "fused", views=views)
    back = dcp_rs.open(tmp_path / "fused", views=dcp_rs.views_for({"model_type": kind}, fuse=False))
    assert_same(dict(back), tensors)


def test_views_for_other_models():
    assert dcp_rs.views_for({"model_type": "llama"}) == []
    assert dcp_rs.views_for({"model_type": "gpt_oss", "num_local_experts": 32}) == []
    assert dcp_rs.views_for({"model_type": "deepseek_v3", "n_routed_experts": None}) == []
    assert dcp_rs.views_for({"model_type": "mixtral", "num_local_experts": 1}) != []
    with pytest.raises(dcp_rs.errors.UnsupportedError, match="new_moe"):
        dcp_rs.views_for({"model_type": "new_moe", "num_experts": 8})
