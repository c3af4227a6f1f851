"""Quantized checkpoints as libraries publish them, and what their weights are: by the published formulas, in torch, one operation after another."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FP4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)

Tensors = dict[str, torch.Tensor]


def write(
    path: Path, tensors: Tensors, config: dict[str, Any] | None = None, *, files: int = 1
) -> Path:
    """A folder as transformers writes one: files, their index, and the configuration."""
    path.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        own = {
            name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % files == number
        }
        save_file(
            {name: tensor.contiguous() for name, tensor in own.items()},
            path / file,
            metadata={"format": "pt"},
        )
        weight_map.update(dict.fromkeys(own, file))
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    if config is not None:
        (path / "config.json").write_text(
            json.dumps({"model_type": "x", "quantization_config": config})
        )
    return path


def codes(*shape: int, seed: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    itemsize = dtype.itemsize
    flat = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * itemsize), generator=generator, dtype=torch.uint8
    )
    return flat.view(dtype)


def repeated(scale: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    """A scale for each element."""
    wide = scale.repeat_interleave(block[0], -2)[..., :rows, :]
    return wide.repeat_interleave(block[1], -1)[..., :columns]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The halves of bytes, the low one first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def fp8(
    name: str,
    *shape: int,
    seed: int,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensors, torch.Tensor]:
    """Blocks of float8, and what they are in float32."""
    *lead, rows, columns = shape
    weight = codes(*shape, seed=seed, dtype=torch.float8_e4m3fn)
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if dtype == torch.float8_e8m0fnu:
        scale = codes(*grid, seed=seed + 1, dtype=dtype)
    else:
        scale = torch.randn(grid, generator=torch.Generator().manual_seed(seed)).to(dtype)
    whole = weight.float() * repeated(scale.float(), rows, columns, block)
    return {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}, whole


def exponents(*shape: int, seed: int, dtype: torch.dtype = torch.float8_e8m0fnu) -> torch.Tensor:
    """Scales of 2**-20 to 2**20, as exponents with a bias of 127."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(107, 148, shape, generator=generator, dtype=torch.uint8).view(dtype)


def deepseek_v4(
    name: str, rows: int, columns: int, *, seed: int, expert: bool
) -> tuple[Tensors, torch.Tensor]:
    """FP8 in blocks of 128 x 128, or an expert in two codes of E2M1 a byte and groups of 32."""
    if expert:
        packed = codes(rows, columns // 2, seed=seed, dtype=torch.int8)
        scale = exponents(rows, -(-columns // 32), seed=seed)
        numbers, block = FP4[nibbles(packed.view(torch.uint8))], (1, 32)
    else:
        packed = codes(rows, columns, seed=seed, dtype=torch.float8_e4m3fn)
        scale = exponents(-(-rows // 128), -(-columns // 128), seed=seed)
        numbers, block = packed.float(), (128, 128)
    whole = numbers * repeated(scale.float(), rows, columns, block)
    return {f"{name}.weight": packed, f"{name}.scale": scale}, whole


def mxfp8(
    name: str,
    rows: int,
    columns: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.uint8,
    end: str = "_scale",
) -> tuple[Tensors, torch.Tensor]:
    """Groups of 32 numbers of float8 in a row, with an exponent each."""
    weight = codes(rows, columns, seed=seed, dtype=torch.float8_e4m3fn)
    scale = exponents(rows, -(-columns // 32), seed=seed, dtype=dtype)
    powers = repeated(scale.view(torch.float8_e8m0fnu).float(), rows, columns, (1, 32))
    return {f"{name}.weight": weight, f"{name}.weight{end}": scale}, weight.float() * powers


def mxfp4_rows(
    name: str, rows: int, columns: int, *, seed: int, modelopt: bool
) -> tuple[Tensors, torch.Tensor]:
    """Groups of 32 codes of E2M1 in a row, whose bytes are no dimension of their own."""
    packed = codes(rows, columns // 2, seed=seed)
    scale = exponents(rows, -(-columns // 32), seed=seed, dtype=torch.uint8)
    powers = repeated(scale.view(torch.float8_e8m0fnu).float(), rows, columns, (1, 32))
    stored = f"{name}.weight" if modelopt else f"{name}.weight_packed"
    return {stored: packed, f"{name}.weight_scale": scale}, FP4[nibbles(packed)] * powers


def channel(
    name: str, rows: int, columns: int, *, seed: int, scale_shape: tuple[int, ...]
) -> tuple[Tensors, torch.Tensor]:
    """Float8 with a scale for each row, or for all."""
    weight = codes(rows, columns, seed=seed, dtype=torch.float8_e4m3fn)
    scale = torch.randn(scale_shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {f"{name}.weight": weight, f"{name}.weight_scale": scale}, weight.float() * scale.float()


def mxfp4(name: str, *shape: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    """Groups of 32, of ``shape[-1]`` elements in all."""
    *outer, columns = shape
    blocks = codes(*outer, columns // 32, 16, seed=seed)
    scales = codes(*outer, columns // 32, seed=seed + 1)
    powers = scales.view(torch.float8_e8m0fnu).float()
    whole = FP4[nibbles(blocks)] * powers[..., None]
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, whole.flatten(-2)


def int4(
    name: str,
    rows: int,
    columns: int,
    *,
    seed: int,
    group: int,
    zeros: bool = False,
    has_shape: bool = True,
) -> tuple[Tensors, torch.Tensor]:
    """Eight integers in an int32, as compressed-tensors packs them."""
    words = -(-columns // 8)
    packed = codes(rows, words, seed=seed, dtype=torch.int32)
    groups = -(-columns // group)
    scale = torch.randn((rows, groups), generator=torch.Generator().manual_seed(seed)).bfloat16()
    numbers = nibbles(packed.view(torch.uint8)).float() - 8
    tensors = {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale}
    zero = torch.zeros(rows, groups)
    if zeros:
        points = codes(groups, -(-rows // 8), seed=seed + 1, dtype=torch.int32)
        tensors[f"{name}.weight_zero_point"] = points.T.contiguous()
        zero = (nibbles(points.contiguous().view(torch.uint8)).float() - 8).T[:rows]
    if has_shape:
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])
    block = (1, group)
    whole = (numbers[:, :columns] - repeated(zero, rows, columns, block)) * repeated(
        scale.float(), rows, columns, block
    )
    return tensors, whole


def nvfp4(
    name: str, rows: int, columns: int, *, seed: int, modelopt: bool
) -> tuple[Tensors, torch.Tensor]:
    """Two numbers in a byte, with scales that have one of their own."""
    packed = codes(rows, columns // 2, seed=seed)
    scale = codes(rows, columns // 16, seed=seed + 1, dtype=torch.float8_e4m3fn)
    whole = torch.rand((), generator=torch.Generator().manual_seed(seed)) + 0.5
    if modelopt:
        tensors = {
            f"{name}.weight": packed,
            f"{name}.weight_scale": scale,
            f"{name}.weight_scale_2": whole,
        }
        scales = scale.float() * whole
    else:
        tensors = {
            f"{name}.weight_packed": packed,
            f"{name}.weight_scale": scale,
            f"{name}.weight_global_scale": whole[None],
        }
        scales = scale.float() / whole
    return tensors, FP4[nibbles(packed)] * repeated(scales, rows, columns, (1, 16))


def in_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Scales in the tiles of 128 x 4 that cuBLAS takes: "Block scaling factors layout" in its documentation."""
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    tile = row // 128 * across + column // 4
    tiles = torch.zeros(down * across * 512, dtype=torch.uint8)
    at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    tiles[at] = scale.view(torch.uint8)
    return tiles.view(down * 128, across * 4).view(scale.dtype)


def as_json(value: Any) -> torch.Tensor:
    """A description of a layer, as ComfyUI stores it."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def comfy(
    name: str, rows: int, columns: int, *, seed: int, form: str
) -> tuple[Tensors, torch.Tensor]:
    """MXFP8 or NVFP4 of ComfyUI: scales in tiles, and the high half of a byte first."""
    if form == "mxfp8":
        tensors, whole = mxfp8(name, rows, columns, seed=seed, dtype=torch.float8_e8m0fnu)
    else:
        tensors, whole = nvfp4(name, rows, columns, seed=seed, modelopt=True)
        packed = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = packed >> 4 | packed << 4
    tensors[f"{name}.weight_scale"] = in_tiles(tensors[f"{name}.weight_scale"])
    tensors[f"{name}.comfy_quant"] = as_json({"format": form})
    return tensors, whole


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are the same to the bit, but for what a NaN is made of."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    nan = expected.isnan()
    left, right = (tensor.masked_fill(nan, 0).contiguous().view(bits) for tensor in (got, expected))
    return torch.equal(got.isnan(), nan) and torch.equal(left, right)
