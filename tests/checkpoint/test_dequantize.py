"""Quantized weights as tensors, by every way in: to the bit what the published formulas give."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import dcp_rs
from support import quantized
from support.files import drop_from_page_cache
from support.quantized import same

BF16 = torch.bfloat16


def one_of_each(path: Path) -> dict[str, torch.Tensor]:
    """A folder with a weight of each format, in two files; returns what they are in float32."""
    made = [
        quantized.fp8("a.blocks", 130, 200, seed=1),
        quantized.fp8("a.ragged", 7, 5, seed=2, dtype=torch.float8_e8m0fnu),
        quantized.fp8("a.experts", 3, 129, 130, seed=3),
        quantized.channel("b.channel", 9, 40, seed=4, scale_shape=(9, 1)),
        quantized.channel("b.tensor", 9, 40, seed=5, scale_shape=()),
        quantized.channel("b.one", 9, 40, seed=6, scale_shape=(1,)),
        quantized.mxfp4("c.experts", 2, 5, 96, seed=7),
        quantized.mxfp4("c.large", 33, 2048, seed=13),
        quantized.nvfp4("e.large", 33, 1024, seed=14, modelopt=True),
        quantized.int4("d.int4", 10, 64, seed=8, group=32),
        quantized.int4("d.zeros", 10, 64, seed=9, group=32, zeros=True),
        quantized.int4("d.odd", 10, 21, seed=10, group=21),
        quantized.nvfp4("e.modelopt", 6, 48, seed=11, modelopt=True),
        quantized.nvfp4("e.compressed", 6, 48, seed=12, modelopt=False),
        quantized.channel("b.flat", 9, 40, seed=15, scale_shape=(9, 1)),
        quantized.deepseek_v4("f.attn", 130, 200, seed=16, expert=False),
        quantized.deepseek_v4("f.expert", 6, 96, seed=17, expert=True),
        quantized.deepseek_v4("f.large", 33, 2048, seed=18, expert=True),
        quantized.mxfp8("g.mxfp8", 6, 80, seed=19),
        quantized.mxfp8("g.exponents", 6, 96, seed=20, dtype=torch.float8_e8m0fnu),
        quantized.mxfp8("g.inverse", 6, 96, seed=21, end="_scale_inv"),
        quantized.mxfp4_rows("h.modelopt", 6, 72, seed=22, modelopt=True),
        quantized.mxfp4_rows("h.compressed", 33, 2048, seed=23, modelopt=False),
        quantized.comfy("i.mxfp8", 160, 224, seed=24, form="mxfp8"),
        quantized.comfy("i.nvfp4", 272, 176, seed=25, form="nvfp4"),
        quantized.comfy("i.large", 272, 2048, seed=26, form="nvfp4"),
    ]
    flat = next(stored for stored, _ in made if "b.flat.weight" in stored)
    flat["b.flat.weight_scale"] = flat["b.flat.weight_scale"].flatten()
    tensors = {name: tensor for stored, _ in made for name, tensor in stored.items()}
    plain = {"norm.weight": torch.randn(5).half(), "a.bias": torch.arange(4)}
    activations = {"b.tensor.input_scale": torch.tensor(1.0), "a.k_scale": torch.tensor(2.0)}
    quantized.write(path, {**tensors, **plain, **activations}, files=2)
    names = [next(iter(stored)) for stored, _ in made]
    names = [name.removesuffix("_packed").removesuffix("_blocks") for name in names]
    return {**dict(zip(names, (whole for _, whole in made), strict=True)), **plain}


def wanted(expected: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    plain = ("norm.weight", "a.bias")
    return {
        name: tensor if name in plain else tensor.to(dtype) for name, tensor in expected.items()
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor) if name == "a.bias" else same(got[name], tensor), name


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_every_way_in(tmp_path, target):
    expected = wanted(one_of_each(tmp_path / "q"), target)
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=target)
    assert_same(dict(checkpoint), expected)
    assert_same(dict(checkpoint.stream()), expected)
    assert_same(checkpoint.state_dict(copy=True), expected)
    assert {name: checkpoint.info(name).shape for name in checkpoint} == {
        n: t.shape for n, t in expected.items()
    }

    empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp_rs.load(empty, tmp_path / "q", dequantize=target)
    assert_same(empty, expected)
    empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(empty, storage_reader=dcp_rs.RsReader(tmp_path / "q", dequantize=target))
    assert_same(empty, expected)
    dcp_rs.convert(tmp_path / "q", tmp_path / "out", dequantize=target)
    assert_same(dict(dcp_rs.open(tmp_path / "out")), expected)


def test_true_means_bfloat16_and_false_nothing(tmp_path):
    expected = one_of_each(tmp_path / "q")
    assert_same(dict(dcp_rs.open(tmp_path / "q", dequantize=True)), wanted(expected, BF16))
    assert "c.experts_scales" in dcp_rs.open(tmp_path / "q")
    with pytest.raises(ValueError, match="float64"):
        dcp_rs.open(tmp_path / "q", dequantize=torch.float64)


def test_other_integers_stay(tmp_path):
    """Masks and counters are integers without being codes."""
    tensors = {
        "w.weight": torch.randn(4, 4),
        "mask": torch.ones(4, 4, dtype=torch.uint8),
        "positions": torch.ones(4, 4, dtype=torch.int32),
        "flags": torch.ones(8, dtype=torch.int8),
        "x_scale": torch.ones(1),
    }
    dcp_rs.save(tensors, tmp_path / "ckpt")
    checkpoint = dcp_rs.open(tmp_path / "ckpt", dequantize=True)
    assert sorted(checkpoint) == sorted(tensors)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_of_dcp_rs_in_shards_of_its_own(tmp_path):
    """Codes that are stored in several chunks, with digests, which are checked on the way."""
    stored, whole = quantized.fp8("m", 300, 200, seed=20)
    dcp_rs.save(stored, tmp_path / "ckpt")
    assert same(
        dcp_rs.open(tmp_path / "ckpt", dequantize=True, verify=True)["m.weight"], whole.to(BF16)
    )
    file = next((tmp_path / "ckpt").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp_rs.errors.CorruptDataError, match=r"m\.weight"):
        dcp_rs.open(tmp_path / "ckpt", dequantize=True, verify=True)["m.weight"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_default_verification_costs_no_reads(tmp_path, dtype):
    """In place, and by slabs: windows end within blocks, and each read all that it touched."""
    stored, whole = quantized.fp8("m", 2000, 1500, seed=20)
    dcp_rs.save(stored, tmp_path, no_dist=True)
    read = {}
    for verify in ("auto", False):
        drop_from_page_cache(tmp_path)
        state = {"m.weight": torch.zeros(2000, 1500, dtype=dtype)}
        report = dcp_rs.load(
            state,
            tmp_path,
            dequantize=True,
            io="direct",
            verify=verify,
            dtype_policy="cast",
            no_dist=True,
        )
        assert same(state["m.weight"], whole.to(BF16).to(dtype))
        read[verify] = report.bytes_read
    assert read["auto"] <= 1.1 * read[False]


def test_strided_destinations_and_slices(tmp_path):
    expected = wanted(one_of_each(tmp_path / "q"), BF16)["a.blocks.weight"]
    into = torch.zeros(200, 130, dtype=BF16).T
    dcp_rs.load({"a.blocks.weight": into}, tmp_path / "q", dequantize=True)
    assert same(into, expected)
    part = dcp_rs.open(tmp_path / "q", dequantize=True).get_slice("a.blocks.weight")
    assert same(part[3:129:7, 100:], expected[3:129:7, 100:])


@given(
    data=st.data(),
    name=st.sampled_from(
        [
            "a.experts.weight",
            "c.experts",
            "c.large",
            "d.zeros.weight",
            "e.large.weight",
            "d.odd.weight",
            "b.flat.weight",
            "f.attn.weight",
            "f.large.weight",
            "g.mxfp8.weight",
            "h.modelopt.weight",
            "h.compressed.weight",
            "i.mxfp8.weight",
            "i.nvfp4.weight",
            "i.large.weight",
        ]
    ),
)
def test_a_slice_is_the_slice_of_the_whole(tmp_path_factory, data, name):
    path = tmp_path_factory.getbasetemp() / "slices"
    if not path.exists():
        torch.save(one_of_each(path), path / "expected.pt")
    expected = torch.load(path / "expected.pt")[name].to(BF16)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in expected.shape]
    region = tuple(slice(begin, end) for begin, end in bounds)
    assert same(dcp_rs.open(path, dequantize=True).get_slice(name)[region], expected[region])


def test_reads_only_what_a_column_shard_needs(tmp_path):
    stored, whole = quantized.fp8("m", 1024, 4096, seed=21)
    quantized.write(tmp_path / "q", stored)
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=True, io="mmap")
    assert same(checkpoint.get_slice("m.weight")[:, :1024], whole.to(BF16)[:, :1024])
    assert checkpoint.report.bytes_read <= 1.1 * (1024 * 1024 + 8 * 8 * 4)


def test_stored_parts_are_no_entries(tmp_path):
    one_of_each(tmp_path / "q")
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=True)
    assert same(checkpoint["c.experts_blocks"], checkpoint["c.experts"])
    assert "c.experts_blocks" not in list(checkpoint)
    for name in (
        "c.experts_scales",
        "a.blocks.weight_scale_inv",
        "d.int4.weight_packed",
        "b.tensor.input_scale",
    ):
        with pytest.raises(KeyError):
            checkpoint[name]


def test_an_open_checkpoint_and_metadata_pickle(tmp_path):
    import pickle

    expected = wanted(one_of_each(tmp_path / "q"), torch.float32)
    checkpoint = pickle.loads(pickle.dumps(dcp_rs.open(tmp_path / "q", dequantize=torch.float32)))
    assert same(checkpoint["c.experts"], expected["c.experts"])
    metadata = dcp_rs.RsReader(tmp_path / "q", dequantize=torch.float32).read_metadata()
    metadata = pickle.loads(pickle.dumps(metadata))
    assert metadata.state_dict_metadata["c.experts"].size == expected["c.experts"].shape


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("m.weight"), "m.weight_scale_inv"),
        (lambda t: t.update({"m.weight_scale_inv": torch.ones(3, 2)}), "m.weight"),
        (lambda t: t.update({"m.weight_scale_inv": torch.ones(2, 2).int()}), "m.weight"),
        (lambda t: t.pop("m.weight_scale_inv"), "m.weight"),
        (lambda t: t.update({"m.weight": torch.ones(130, 130, dtype=torch.int8)}), "m.weight"),
        (lambda t: t.update({"m.weight": torch.ones(130).to(torch.float8_e4m3fn)}), "m.weight"),
        (lambda t: t.update({"n.weight_packed": torch.ones(3, 4).int()}), "n.weight_packed"),
        (lambda t: t.update({"n_blocks": torch.ones(3, 4, 16).byte()}), "n_blocks"),
        (lambda t: t.update({"n_scales": torch.ones(3, 4).byte()}), "n_scales"),
        (
            lambda t: t.update(
                {
                    "n.weight": torch.ones(3, 8).byte(),
                    "n.weight_scale": torch.ones(3, 1).to(torch.float8_e4m3fn),
                }
            ),
            "n.weight",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, change, named):
    tensors, _ = quantized.fp8("m", 130, 130, seed=30)
    change(tensors)
    quantized.write(tmp_path / "q", tensors, FP8_CONFIG)
    with pytest.raises(dcp_rs.QuantizationError, match=named) as error:
        dcp_rs.open(tmp_path / "q", dequantize=True)
    assert error.value.tensor == named
    assert isinstance(error.value, dcp_rs.errors.UnsupportedError)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128.5, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}},
        },
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "W8A16"}}},
        FP8_CONFIG | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        FP8_CONFIG | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        FP8_CONFIG | {"fmt": "e5m2"},
    ],
)
def test_configurations_that_are_not_known_are_refused(tmp_path, config):
    """Even where the names look known."""
    tensors, _ = quantized.fp8("m", 130, 130, seed=31)
    quantized.write(tmp_path / "q", tensors, config)
    with pytest.raises(dcp_rs.QuantizationError, match=r"config\.json"):
        dcp_rs.open(tmp_path / "q", dequantize=True)
    assert "m.weight" in dcp_rs.open(tmp_path / "q")


def test_the_configuration_tells_the_size_of_blocks(tmp_path):
    tensors, whole = quantized.fp8("m", 70, 90, seed=32, block=(32, 64))
    quantized.write(tmp_path / "q", tensors)
    with pytest.raises(dcp_rs.QuantizationError, match=r"\[3, 2\]"):
        dcp_rs.open(tmp_path / "q", dequantize=True)
    quantized.write(tmp_path / "q", tensors, {"quant_method": "fp8", "weight_block_size": [32, 64]})
    assert same(dcp_rs.open(tmp_path / "q", dequantize=True)["m.weight"], whole.to(BF16))


def test_shapes_that_contradict_the_codes_are_refused(tmp_path):
    tensors, _ = quantized.int4("m", 4, 21, seed=33, group=21)
    tensors["m.weight_shape"] = torch.tensor([4, 25])
    quantized.write(tmp_path / "q", tensors)
    with pytest.raises(dcp_rs.QuantizationError, match=r"m\.weight_shape says"):
        dcp_rs.open(tmp_path / "q", dequantize=True)


def test_zero_points_of_each_expert_are_its_own(tmp_path):
    """All experts of a 3-D weight took the zero points of the first."""
    made = [
        quantized.int4("m", 10, 64, seed=seed, group=16, zeros=True, has_shape=False)
        for seed in (1, 3, 5)
    ]
    tensors = {name: torch.stack([stored[name] for stored, _ in made]) for name in made[0][0]}
    quantized.write(tmp_path / "q", tensors)
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=torch.float32)
    whole = torch.stack([weight for _, weight in made])
    assert same(checkpoint["m.weight"], whole)
    assert same(checkpoint.get_slice("m.weight")[1:, 3:9, 5:40], whole[1:, 3:9, 5:40].contiguous())


def of_groups(*sizes):
    """A configuration of INT4 weights in groups of these sizes; None is a whole row."""
    groups = {
        f"group_{size}": {"weights": {"num_bits": 4, "type": "int", "group_size": size}}
        for size in sizes
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize("is_configured", [False, True])
def test_rows_that_end_within_a_word_are_as_long_as_their_shape_says(tmp_path, is_configured):
    """Two groups of 30 in eight words were taken for two groups of 32."""
    tensors, whole = quantized.int4("m", 10, 60, seed=3, group=30)
    quantized.write(tmp_path / "q", tensors, of_groups(30) if is_configured else None)
    assert same(dcp_rs.open(tmp_path / "q", dequantize=torch.float32)["m.weight"], whole)


@pytest.mark.parametrize(
    ("columns", "sizes"), [(251, [128]), (200, [128, 32]), (90, [128, 64]), (90, [None, 64])]
)
def test_a_last_group_that_is_shorter(tmp_path, columns, sizes):
    """251 columns came back with 5 of padding, and groups of 128 were taken for groups of 100."""
    group = sizes[0] or columns
    tensors, whole = quantized.int4("m", 4, columns, seed=3, group=group)
    more, more_whole = quantized.int4("n", 4, columns, seed=4, group=group)
    quantized.write(tmp_path / "q", {**tensors, **more}, of_groups(*sizes))
    checkpoint = dcp_rs.open(tmp_path / "q", dequantize=torch.float32)
    assert same(checkpoint["m.weight"], whole)
    assert same(checkpoint["n.weight"], more_whole)


@pytest.mark.parametrize(
    ("columns", "config", "why"),
    [
        (251, None, "has no groups of one size for 251 columns"),
        (240, of_groups(128, 120), "could have groups of 120 or 128 for 240 columns"),
        (240, of_groups(64, 32), "has no groups of 32 or 64 for 240 columns"),
    ],
)
def test_groups_that_cannot_be_told_are_refused(tmp_path, columns, config, why):
    tensors, _ = quantized.int4("m", 4, columns, seed=3, group=128)
    quantized.write(tmp_path / "q", tensors, config)
    with pytest.raises(dcp_rs.QuantizationError, match=why):
        dcp_rs.open(tmp_path / "q", dequantize=True)


def test_scales_of_another_count_than_the_configuration_says_are_refused(tmp_path):
    """One scale for a block went for one of the whole weight, and groups of 64 for those of 128."""
    tensors = {"m.weight": quantized.codes(256, 256, seed=1, dtype=torch.float8_e4m3fn)}
    tensors["m.weight_scale_inv"] = torch.ones(1, 1)
    quantized.write(
        tmp_path / "fp8", tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    with pytest.raises(
        dcp_rs.QuantizationError, match=r"\[1, 1\], and should have the shape \[2, 2\]"
    ):
        dcp_rs.open(tmp_path / "fp8", dequantize=True)

    tensors, _ = quantized.int4("m", 4, 256, seed=1, group=64)
    quantized.write(tmp_path / "int4", tensors, of_groups(128))
    with pytest.raises(dcp_rs.QuantizationError, match="no groups of 128 for 256 columns"):
        dcp_rs.open(tmp_path / "int4", dequantize=True)


def test_blocks_find_their_weight_beside_views(tmp_path):
    """With any view they were unknown."""
    tensors, whole = quantized.mxfp4("m", 5, 64, seed=1)
    quantized.write(tmp_path / "q", {**tensors, "norm": torch.zeros(2, 3)})
    checkpoint = dcp_rs.open(
        tmp_path / "q", dequantize=True, views=dcp_rs.Transpose("norm", (1, 0))
    )
    assert same(checkpoint["m_blocks"], whole.to(BF16))


def test_parts_of_a_weight_are_not_tied(tmp_path):
    """Experts cut from one decoded tensor went for one tensor with several names: all but the first were not written."""
    tensors, whole = quantized.mxfp4("experts", 3, 5, 64, seed=1)
    quantized.write(tmp_path / "q", tensors)
    views = dcp_rs.Unstack("experts", into="experts.{expert}")
    dcp_rs.convert(tmp_path / "q", tmp_path / "out", to="safetensors", dequantize=True, views=views)
    written = dcp_rs.open(tmp_path / "out")
    assert_same(dict(written), {f"experts.{i}": expert for i, expert in enumerate(whole.to(BF16))})


def test_torchs_reader_is_the_judge(tmp_path):
    """Of MXFP4 its kernel: the reader corrects the size of a tensor and not that of its chunk, and fills 1/32 of it."""
    module = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    tensors, _ = quantized.fp8("m", 300, 200, seed=40)
    experts, _ = quantized.mxfp4("e", 2, 5, 96, seed=41)
    quantized.write(tmp_path / "q", {**tensors, **experts}, files=2)
    request = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=(2, 5, 96))
    for target in (torch.float32, torch.bfloat16):
        theirs = module.QuantizedHuggingFaceStorageReader(str(tmp_path / "q"), target_dtype=target)
        expected = {"m.weight": torch.zeros(300, 200, dtype=target)}
        dcp.load(expected, storage_reader=theirs)
        ours = {
            "m.weight": torch.zeros(300, 200, dtype=target),
            "e_blocks": torch.zeros(2, 5, 96, dtype=target),
        }
        dcp.load(ours, storage_reader=dcp_rs.RsReader(tmp_path / "q", dequantize=target))
        assert same(ours["m.weight"], expected["m.weight"])
        whole = theirs._dequantize_tensor_mxfp4(
            experts["e_blocks"], experts["e_scales"], request, 0, 0
        )
        # A scale of 255 is infinite there. It is no number (section 5.4.1 of the OCP's
        # specification of E8M0).
        known = experts["e_scales"].repeat_interleave(32, -1) != 255
        assert ours["e_blocks"][~known].isnan().all()
        assert same(ours["e_blocks"][known], whole[known])


def test_merges_are_of_dequantized_weights(tmp_path):
    whole = [one_of_each(tmp_path / str(i)) for i in range(2)]
    mean = (whole[0]["a.blocks.weight"] + whole[1]["a.blocks.weight"]) / 2
    inputs = [tmp_path / "0", tmp_path / "1"]
    dcp_rs.merge(inputs, tmp_path / "out", dequantize=torch.float32, conflicts="first")
    merged = dcp_rs.open(tmp_path / "out")["a.blocks.weight"]
    assert torch.equal(merged.nan_to_num(), mean.nan_to_num())
    assert torch.equal(merged.isnan(), mean.isnan())


def test_config_json_that_is_no_json_is_refused(tmp_path):
    tensors, _ = quantized.fp8("m", 13, 13, seed=42)
    quantized.write(tmp_path / "q", tensors)
    (tmp_path / "q" / "config.json").write_text("{")
    with pytest.raises(dcp_rs.QuantizationError) as refused:
        dcp_rs.open(tmp_path / "q", dequantize=True)
    assert str(refused.value).count("config.json") == 1
    (tmp_path / "q" / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert dcp_rs.open(tmp_path / "q", dequantize=True)["m.weight"].dtype == BF16


def test_parameters_whose_names_end_like_scales_of_activations_stay(tmp_path):
    """`correct_output_scale` of Gemma 3n, a parameter of its own, was lost."""
    tensors, whole = quantized.fp8("m", 130, 130, seed=1)
    name = "layers.0.altup.correct_output_scale"
    learned = torch.randn(8).bfloat16()
    scales = {"m.input_scale": torch.tensor(1.0), "m.output_scale": torch.tensor(1.0)}
    # Of modules that are not quantized.
    others = {"vision.attn.q_scale": torch.ones(8, 1), "vision.output_scale": torch.ones(())}
    quantized.write(tmp_path / "q", {**tensors, name: learned, **scales, **others})
    dcp_rs.convert(tmp_path / "q", tmp_path / "out", to="safetensors", dequantize=True)
    opened = dcp_rs.open(tmp_path / "out")
    assert sorted(opened) == sorted(["m.weight", name, *others])
    assert same(opened[name], learned)
    assert same(opened["m.weight"], whole.to(BF16))


def test_one_group_that_is_longer_than_the_rows(tmp_path):
    """124 columns in sixteen words, of a group of 128, were taken for 128 columns."""
    tensors, whole = quantized.int4("m", 10, 124, seed=3, group=128)
    weights = {"num_bits": 4, "type": "int", "group_size": 128}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    quantized.write(tmp_path / "q", tensors, config)
    assert same(dcp_rs.open(tmp_path / "q", dequantize=torch.float32)["m.weight"], whole)


@pytest.mark.parametrize("columns", [21, 24])
@pytest.mark.parametrize("told", [[5, 24], [4, 40], [4], [-4, 24], [4, -24], [2, 4, 24], []])
def test_every_shape_is_compared_with_its_codes(tmp_path, columns, told):
    """After one weight of a size, the shapes of others of that size were not read."""
    whole, _ = quantized.int4("a", 4, 24, seed=33, group=8)
    tensors, _ = quantized.int4("m", 4, columns, seed=33, group=columns if columns == 21 else 8)
    tensors["m.weight_shape"] = torch.tensor(told, dtype=torch.int64)
    quantized.write(tmp_path / "q", {**whole, **tensors}, of_groups(8, 21))
    with pytest.raises(dcp_rs.QuantizationError, match=r"m\.weight") as error:
        dcp_rs.open(tmp_path / "q", dequantize=True)
    assert str(told) in str(error.value) or not told


CODES = torch.ones(4, 32, dtype=torch.uint8)
FP8 = torch.ones(4, 32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        # Codes beside what may be a scale, or without one.
        ({"m.weight": FP8}, "m.weight"),
        ({"m.weight": FP8.float().to(torch.float8_e5m2)}, "m.weight"),
        ({"m.weight": FP8, "m.scale": torch.ones(())}, "m.weight"),
        ({"m.weight": FP8, "m.weight_scale": torch.ones(1), "m.weight_scale_2": torch.ones(1)},
         "m.weight_scale_2"),
        ({"m.weight": FP8.float().to(torch.float8_e5m2), "m.weight_scale": torch.ones(1)},
         "m.weight"),
        ({"amax": FP8[0]}, "amax"),
        ({"m.weight": CODES.char(), "m.scale": torch.ones(4, 1)}, "m.weight"),
        ({"m.weight": CODES, "m.weight_scale": torch.ones(1)}, "m.weight"),  # BitNet
        ({"m.weight": CODES.char(), "m.SCB": torch.ones(4)}, "m.weight"),  # bitsandbytes
        ({"m.weight": CODES, "m.weight.absmax": torch.ones(4)}, "m.weight"),
        ({"m.qweight": CODES.int(), "m.scales": torch.ones(4, 1).half()}, "m.qweight"),  # GPTQ
        ({"m.W_q": CODES, "m.scale": torch.ones(4, 1)}, "m.W_q"),  # HQQ
        ({"m.weight._data": CODES, "m.weight._scale": torch.ones(4, 1)}, "m.weight._data"),
        ({"m.weight_qdata": CODES.char(), "m.weight_scale": torch.ones(4, 1)}, "m.weight_qdata"),
        ({"m.weight": torch.ones(4, 4).bfloat16(), "m.weight_scale": torch.ones(4, 1)},
         "m.weight_scale"),
        # NVFP4 as modelopt stores it, and more that changes it.
        ({**quantized.nvfp4("m", 4, 32, seed=1, modelopt=True)[0],
          "m.pre_quant_scale": torch.ones(32)}, "m.pre_quant_scale"),
        ({**quantized.nvfp4("m", 4, 32, seed=1, modelopt=True)[0],
          "m.weight_zero_point": torch.ones(4)}, "m.weight_zero_point"),
        # The last scale of the module is not that of the codes.
        ({"m.w1": CODES, "m.w1_scale": torch.ones(4, 1), "m.zero_scale": torch.ones(1)}, "m.w1"),
        ({"m.weight_q": CODES, "m.scale": torch.ones(4, 1)}, "m.weight_q"),
        # Of ComfyUI.
        ({"m.weight": FP8, "m.scale_weight": torch.ones(4, 1)}, "m.weight"),
        ({"m.weight": FP8.bfloat16(), "m.scale_weight": torch.ones(1)}, "m.scale_weight"),
    ],
)  # fmt: skip
def test_codes_of_formats_that_are_not_known_are_refused(tmp_path, stored, named):
    """Without a configuration, codes passed for weights."""
    quantized.write(tmp_path / "q", {**stored, "norm.weight": torch.ones(4)})
    with pytest.raises(dcp_rs.QuantizationError) as error:
        dcp_rs.open(tmp_path / "q", dequantize=True)
    assert error.value.tensor == named
    out = tmp_path / "out"
    with pytest.raises(dcp_rs.QuantizationError):
        dcp_rs.convert(tmp_path / "q", out, to="safetensors", dequantize=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("stored", "scale"),
    [
        (quantized.fp8("m", 4, 32, seed=1)[0], "m.weight_scale_inv"),
        (quantized.deepseek_v4("m", 4, 32, seed=1, expert=True)[0], "m.scale"),
        ({"m.weight": FP8, "m.scale_weight": torch.ones(1)}, "m.scale_weight"),
        ({"m.weight": CODES.char(), "m.SCB": torch.ones(4)}, "m.SCB"),
    ],
)
def test_a_warning_says_that_what_is_read_are_codes(tmp_path, stored, scale):
    quantized.write(tmp_path / "q", stored)
    with pytest.warns(UserWarning, match=rf"'m.weight' .* looks quantized.*'{scale}'"):
        checkpoint = dcp_rs.open(tmp_path / "q")
    assert torch.equal(
        checkpoint["m.weight"].view(torch.uint8), stored["m.weight"].view(torch.uint8)
    )
    with pytest.warns(UserWarning, match="looks quantized"):
        dcp_rs.load({"m.weight": torch.zeros_like(stored["m.weight"])}, tmp_path / "q")


def test_no_warning_without_codes(tmp_path, recwarn):
    tensors = {"m.weight": torch.ones(4, 4), "m.scale": torch.ones(4), "m.mask": CODES}
    quantized.write(tmp_path / "q", tensors)
    dcp_rs.open(tmp_path / "q")
    quantized.write(tmp_path / "fp8", quantized.fp8("m", 4, 32, seed=1)[0])
    dcp_rs.open(tmp_path / "fp8", dequantize=True)
    assert not recwarn.list


def test_files_of_comfyui(tmp_path):
    """Float8 with a scale for each tensor, in three generations of names."""
    weight = quantized.codes(6, 40, seed=1, dtype=torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    expected = (weight.float() * scale).to(BF16)
    new = {
        "m.weight": weight,
        "m.weight_scale": scale,
        "m.comfy_quant": quantized.as_json(
            {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
        ),
        "m.input_scale": torch.ones(()),
        "m.bias": torch.ones(6),
    }
    old = {
        "m.weight": weight,
        "m.scale_weight": scale,
        "m.scale_input": torch.ones(()),
        "m.bias": torch.ones(6),
        "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
    }
    described = {name: new[name] for name in ("m.weight", "m.weight_scale", "m.bias")}
    layers = {"m": {"format": "float8_e4m3fn"}}
    for i, (tensors, metadata) in enumerate([(new, {}), (old, {}), (described, layers)]):
        path = tmp_path / f"{i}.safetensors"
        about = {"_quantization_metadata": json.dumps({"layers": metadata})} if metadata else None
        save_file(tensors, path, metadata=about)
        checkpoint = dcp_rs.open(path, dequantize=True)
        assert sorted(checkpoint) == ["m.bias", "m.weight"]
        assert same(checkpoint["m.weight"], expected)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (3, 64, 64)])
@pytest.mark.parametrize("end", ["weight_scale", "scale_weight", "weight_scale_inv"])
@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_one_scale_for_a_weight_of_many_matrices(tmp_path, shape, end, scale_shape):
    """Convolutions of ComfyUI's files, and fused experts, were refused."""
    weight = quantized.codes(*shape, seed=1, dtype=torch.float8_e4m3fn)
    scale = torch.full(scale_shape, 0.3)
    quantized.write(tmp_path, {"m.weight": weight, f"m.{end}": scale})
    for dtype in (BF16, torch.float32):
        checkpoint = dcp_rs.open(tmp_path, dequantize=dtype)
        expected = (weight.float() * scale).to(dtype)
        assert same(checkpoint["m.weight"], expected)
        part = checkpoint.get_slice("m.weight")[1:3, 1:, 2:]
        assert same(part, expected[1:3, 1:, 2:].contiguous())


@pytest.mark.parametrize(("form", "group"), [("mxfp8", 32), ("nvfp4", 16)])
def test_scales_of_comfyui_are_in_tiles(tmp_path, form, group):
    """They were refused, and before that decoded as those of others: modelopt's have the same names and, here, shapes."""
    tensors, whole = quantized.comfy("m", 128, 4 * group, seed=1, form=form)
    more = {"m.bias": torch.ones(128), "m.input_scale": torch.ones(())}
    save_file({**tensors, **more}, tmp_path / "new.safetensors")
    del tensors["m.comfy_quant"]
    layers = {"m": {"format": form, "group_size": group, "full_precision_matrix_mult": True}}
    about = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file({**tensors, **more}, tmp_path / "old.safetensors", metadata=about)
    for name in ("new", "old"):
        checkpoint = dcp_rs.open(tmp_path / f"{name}.safetensors", dequantize=torch.float32)
        assert sorted(checkpoint) == ["m.bias", "m.weight"]
        assert same(checkpoint["m.weight"], whole)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, scale: tensors.update({"m.weight_scale": scale[:, :-1]}),
        lambda tensors, scale: tensors.update({"m.weight_scale": scale[:127]}),
        lambda tensors, scale: tensors.update({"m.weight_scale": scale.flatten()}),
        lambda tensors, scale: tensors.update({"m.weight_scale": scale.float()}),
        lambda tensors, scale: tensors.update({"m.weight": tensors["m.weight"].unflatten(0, (2, -1))}),
        lambda tensors, scale: tensors.update({"m.weight": torch.ones(96, 64)}),
        lambda tensors, scale: tensors.pop("m.weight_scale"),
        lambda tensors, scale: tensors.pop("m.weight"),
    ],
)  # fmt: skip
def test_parts_that_are_not_as_comfyui_describes_them_are_refused(tmp_path, form, change):
    tensors, _ = quantized.comfy("m", 96, 64, seed=1, form=form)
    change(tensors, tensors["m.weight_scale"])
    quantized.write(tmp_path, tensors)
    with pytest.raises(dcp_rs.QuantizationError, match=r"m\.weight"):
        dcp_rs.open(tmp_path, dequantize=True)


@pytest.mark.parametrize(
    "about",
    [
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
        {"format": "float8_e4m3fn", "convrot": True},
        {"format": "mxfp8", "group_size": 16},
        {"format": "nvfp4", "convrot": True},
        {"format": "nvfp4", "orig_shape": [100, 60]},
        {"format": "hybrid_mxfp8"},
        {},
    ],
)
def test_other_formats_of_comfyui_are_refused(tmp_path, about):
    """NVFP4 with the high half first and scales in tiles was decoded as that of modelopt."""
    tensors, _ = quantized.nvfp4("m", 128, 64, seed=1, modelopt=True)
    save_file({**tensors, "m.comfy_quant": quantized.as_json(about)}, tmp_path / "new.safetensors")
    metadata = {"_quantization_metadata": json.dumps({"layers": {"m": about}})}
    save_file(tensors, tmp_path / "old.safetensors", metadata=metadata)
    for name in ("new", "old"):
        with pytest.raises(dcp_rs.QuantizationError, match="ComfyUI"):
            dcp_rs.open(tmp_path / f"{name}.safetensors", dequantize=True)
    # A configuration of another model beside it hid what the file says.
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": modelopt}))
    with pytest.raises(dcp_rs.QuantizationError, match="ComfyUI"):
        dcp_rs.open(tmp_path / "old.safetensors", dequantize=True)


def test_empty_description_of_a_layer_is_refused(tmp_path):
    tensors, _ = quantized.nvfp4("m", 128, 64, seed=1, modelopt=True)
    quantized.write(tmp_path, {**tensors, "m.comfy_quant": torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(dcp_rs.QuantizationError, match=r"comfy_quant.*must describe a weight in 1"):
        dcp_rs.open(tmp_path, dequantize=True)


@pytest.mark.parametrize(
    ("file", "config", "columns"),
    [
        ("config.json", {"quantization_config": FP8_CONFIG}, 128),
        ("config.json", {"text_config": {"quantization_config": FP8_CONFIG}}, 128),
        ("config.json", {"llm_config": {"text_config": {"quantization_config": FP8_CONFIG}}}, 128),
        ("config.json", {"compression_config": of_groups(32)}, 32),
    ],
)
def test_places_of_the_configuration(tmp_path, file, config, columns):
    tensors, _ = quantized.fp8("m", 300, 300, seed=1)
    more, _ = quantized.int4("n", 4, 64, seed=1, group=32)
    quantized.write(tmp_path, {**tensors, **more})
    (tmp_path / file).write_text(json.dumps(config))
    dcp_rs.open(tmp_path, dequantize=True)
    (tmp_path / file).write_text(json.dumps(config).replace(str(columns), "64"))
    with pytest.raises(dcp_rs.QuantizationError):
        dcp_rs.open(tmp_path, dequantize=True)


def test_modelopts_own_file_counts(tmp_path):
    """Its algorithm was not looked at."""
    tensors, whole = quantized.nvfp4("m", 4, 32, seed=1, modelopt=True)
    quantized.write(tmp_path, tensors)
    for algorithm, is_known in (("NVFP4", True), ("NVFP4_AWQ", False), ("W8A16", False)):
        about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
        if is_known:
            assert same(dcp_rs.open(tmp_path, dequantize=True)["m.weight"], whole.to(BF16))
        else:
            with pytest.raises(dcp_rs.QuantizationError, match=algorithm):
                dcp_rs.open(tmp_path, dequantize=True)


@pytest.mark.parametrize("is_spread", [True, False])
def test_modelopts_blocks_of_fp8(tmp_path, is_spread):
    """Its scales of blocks keep the dimensions within a block, and its configuration tells no size of blocks."""
    stored, whole = quantized.fp8("m", 130, 300, seed=1)
    scale = stored["m.weight_scale_inv"]
    tensors = {"m.weight": stored["m.weight"], "m.weight_scale": scale}
    if is_spread:
        tensors["m.weight_scale"] = scale[:, None, :, None]
    small, small_whole = quantized.channel("n", 9, 40, seed=2, scale_shape=())
    quantized.write(tmp_path, {**tensors, **small})
    for about in (
        {"quant_algo": "fp8_pb_wo"},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "FP8_PB_WO"}}},
    ):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": about}))
        checkpoint = dcp_rs.open(tmp_path, dequantize=torch.float32)
        assert same(checkpoint["m.weight"], whole)
        assert same(checkpoint["n.weight"], small_whole)
        part = checkpoint.get_slice("m.weight")[120:, 100:290]
        assert same(part, whole[120:, 100:290].contiguous())
    (tmp_path / "hf_quant_config.json").unlink()
    with pytest.raises(dcp_rs.QuantizationError, match=r"m\.weight"):
        dcp_rs.open(tmp_path, dequantize=True)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (3, 1, 1)])
def test_modelopts_scales_of_experts(tmp_path, shape):
    """The experts of Llama 4 are parameters without `.weight`, with a scale for each or one for all."""
    weight = quantized.codes(3, 40, 24, seed=1, dtype=torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    more = {"e.gate_up_proj_input_scale": torch.ones(())}
    stored = {"e.gate_up_proj": weight, "e.gate_up_proj_weight_scale": scale, **more}
    quantized.write(tmp_path, stored)
    checkpoint = dcp_rs.open(tmp_path, dequantize=torch.float32)
    assert list(checkpoint) == ["e.gate_up_proj"]
    whole = weight.float() * (scale.reshape(3, 1, 1) if shape else scale)
    assert same(checkpoint["e.gate_up_proj"], whole)
    part = checkpoint.get_slice("e.gate_up_proj")[1:, 5:30, 3:]
    assert same(part, whole[1:, 5:30, 3:].contiguous())


@pytest.mark.parametrize("shape", [(40,), (24,), (3, 40), (3, 24), (3, 40, 1), (3, 1, 24), (2,)])
def test_other_scales_of_experts_are_refused(tmp_path, shape):
    """Modelopt itself cannot tell rows from columns in square weights."""
    weight = quantized.codes(3, 40, 24, seed=1, dtype=torch.float8_e4m3fn)
    quantized.write(tmp_path, {"e.up": weight, "e.up_weight_scale": torch.ones(shape)})
    with pytest.raises(dcp_rs.QuantizationError, match=r"e\.up"):
        dcp_rs.open(tmp_path, dequantize=True)


def test_packed_experts_of_modelopt_are_refused(tmp_path):
    """NVFP4 experts of Llama 4 are packed along their rows, and nothing but the shapes says so."""
    stored = {
        "e.up": quantized.codes(3, 32, 24, seed=1),
        "e.up_weight_scale": quantized.codes(3, 4, 24, seed=1, dtype=torch.float8_e4m3fn),
        "e.up_weight_scale_2": torch.ones(()),
    }
    quantized.write(tmp_path, stored)
    with pytest.raises(dcp_rs.QuantizationError, match=r"e\.up"):
        dcp_rs.open(tmp_path, dequantize=True)


def test_modelopt_writes_mxfp4_in_lower_case(tmp_path):
    tensors, whole = quantized.mxfp4_rows("m", 4, 64, seed=1, modelopt=True)
    quantized.write(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "mxfp4"})
    assert same(dcp_rs.open(tmp_path, dequantize=True)["m.weight"], whole.to(BF16))


def test_json_of_python(tmp_path):
    """The configurations of Nemotron and Mamba 2 have `Infinity`; editors add byte order marks."""
    tensors, whole = quantized.fp8("m", 70, 90, seed=32, block=(32, 64))
    quantized.write(tmp_path, tensors)
    config = json.dumps(
        {
            "time_step_limit": [0.0, float("inf")],
            "x": float("nan"),
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 64]},
        }
    )
    assert "Infinity" in config
    for text in (config.encode(), config.encode("utf-8-sig")):
        (tmp_path / "config.json").write_bytes(text)
        assert same(dcp_rs.open(tmp_path, dequantize=True)["m.weight"], whole.to(BF16))
    assert dcp_rs.views_for(tmp_path) == []


def test_a_file_that_such_a_configuration_names_is_taken(tmp_path):
    for name in ("chosen", "model"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    config = {"transformers_weights": "chosen.safetensors", "time_step_limit": [0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8-sig")
    assert list(dcp_rs.open(tmp_path)) == ["chosen"]


def test_exponents_for_32_columns_stand_beside_blocks(tmp_path):
    """The tables of DeepSeek-V4's n-grams have a scale for 32 columns, whatever the blocks are."""
    tensors, whole = quantized.mxfp8("m", 6, 96, seed=1, dtype=torch.float8_e8m0fnu)
    tensors = {"m.weight": tensors["m.weight"], "m.scale": tensors["m.weight_scale"]}
    quantized.write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    assert same(dcp_rs.open(tmp_path, dequantize=True)["m.weight"], whole.to(BF16))
