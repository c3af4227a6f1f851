"""Quantized weights and stacked experts, beside torch's reader and beside unquantized tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from harness import page_cache
from harness.context import Context
from harness.driven import worker
from harness.memory import extra_anonymous_bytes
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from harness.states import scramble, size_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import dcp_rs

State = dict[str, torch.Tensor]

DEQUANTIZED = "dcp_rs.load, dequantize=True"
STACKED = "dcp_rs.load, views=[Stack]"
TORCHS = "QuantizedHuggingFaceStorageReader"
TORCHS_KERNEL = "safetensors load_file, and the kernel of QuantizedHuggingFaceStorageReader"
PLAIN = "dcp_rs.load of the same in bfloat16"
ALONE = "dcp_rs.load of the same one by one"
#: Of a checkpoint whose load is timed, and of one whose load is watched for memory.
MATRICES, EXPERTS, MANY_MATRICES = 4, 64, 32


def run(context: Context) -> list[Row]:
    return [*_fp8(context), *_mxfp4(context), *_stacked(context), *_memory(context)]


def _save(path: Path, tensors: State) -> Path:
    if not path.is_dir():
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    page_cache.warm(path)
    return path


def _contender(name: str, state: State, expected: State, load: Callable[[], object]) -> Contender:
    def check() -> None:
        for key, tensor in expected.items():
            if not torch.equal(state[key], tensor):
                msg = f"{name}: {key} differs"
                raise AssertionError(msg)
        scramble(state.values())

    return Contender(name, _untimed(load), verify=check)


def _untimed(load: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        load()

    return run


def _blank(expected: State) -> State:
    state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    scramble(state.values())
    return state


def _fp8_and_plain(context: Context, matrices: int) -> tuple[Path, Path, State]:
    """Write matrices as FP8 blocks and in bfloat16. Return both folders and the matrices."""
    dim = context.sizes.reshard_dim // 2
    grid = dim // 128
    names = [f"layers.{number}.weight" for number in range(matrices)]
    stored = {name: torch.randn(dim, dim).to(torch.float8_e4m3fn) for name in names}
    stored |= {f"{name}_scale_inv": torch.rand(grid, grid) for name in names}
    quantized = _save(context.folder / f"fp8-{matrices}-{dim}", stored)
    stored = load_file(quantized / "model.safetensors")  # of an earlier run, perhaps

    def decoded(name: str) -> torch.Tensor:
        blocks = stored[name].float().view(grid, 128, grid, 128)
        return (blocks * stored[f"{name}_scale_inv"][:, None, :, None]).view(dim, dim).bfloat16()

    expected = {name: decoded(name) for name in names}
    return quantized, _save(context.folder / f"bf16-{matrices}-{dim}", expected), expected


def _fp8(context: Context) -> list[Row]:
    quantized, plain, expected = _fp8_and_plain(context, MATRICES)
    state = _blank(expected)
    reader = QuantizedHuggingFaceStorageReader(str(quantized), target_dtype=torch.bfloat16)
    times = measure(
        [
            _contender(
                DEQUANTIZED,
                state,
                expected,
                lambda: dcp_rs.load(state, quantized, dequantize=True, no_dist=True),
            ),
            _contender(
                TORCHS,
                state,
                expected,
                lambda: dcp.load(state, storage_reader=reader, no_dist=True),
            ),
            Contender(PLAIN, _untimed(lambda: dcp_rs.load(state, plain, no_dist=True))),
        ],
        **context.pairs,
    )
    what = f"{MATRICES} matrices, {size_of(sum(t.nbytes for t in expected.values()))} of bf16"
    return [
        versus(f"FP8 blocks, {what}", times, DEQUANTIZED, TORCHS, reach=10, stretch=30),
        versus(
            f"FP8 blocks beside bf16, {what}", times, DEQUANTIZED, PLAIN, reach=0.4, stretch=0.5
        ),
    ]


def _mxfp4(context: Context) -> list[Row]:
    """Compare with the kernel of torch's reader: the reader fills only 1/32 of such a tensor."""
    dim = context.sizes.reshard_dim // 4
    shape = (MATRICES, dim, dim)
    blocks = torch.randint(0, 256, (MATRICES, dim, dim // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, blocks.shape[:-1], dtype=torch.uint8)
    path = _save(
        context.folder / f"mxfp4-{dim}", {"experts_blocks": blocks, "experts_scales": scales}
    )
    reader = QuantizedHuggingFaceStorageReader(str(path), target_dtype=torch.bfloat16)
    request = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=shape)

    def torchs(stored: State) -> torch.Tensor:
        kernel = reader._dequantize_tensor_mxfp4  # noqa: SLF001  # there is no public one
        return kernel(stored["experts_blocks"], stored["experts_scales"], request, 0, 0)

    expected = {"experts": torchs(load_file(path / "model.safetensors"))}
    state = _blank(expected)
    times = measure(
        [
            _contender(
                DEQUANTIZED,
                state,
                expected,
                lambda: dcp_rs.load(state, path, dequantize=True, no_dist=True),
            ),
            _contender(
                TORCHS_KERNEL,
                state,
                expected,
                lambda: state["experts"].copy_(torchs(load_file(path / "model.safetensors"))),
            ),
        ],
        **context.pairs,
    )
    what = f"{list(shape)}, {size_of(expected['experts'].nbytes)} of bf16"
    return [versus(f"MXFP4, {what}", times, DEQUANTIZED, TORCHS_KERNEL, reach=10, stretch=20)]


def _stacked(context: Context) -> list[Row]:
    dim = context.sizes.reshard_dim // 8
    experts = {
        f"experts.{number}.w": torch.randn(dim, 2 * dim).bfloat16() for number in range(EXPERTS)
    }
    path = _save(context.folder / f"experts-{dim}", experts)
    experts = load_file(path / "model.safetensors")
    joined = {
        "experts.w": torch.stack([experts[f"experts.{number}.w"] for number in range(EXPERTS)])
    }
    state, alone = _blank(joined), _blank(experts)
    views = [dcp_rs.Stack("experts.{n}.w", into="experts.w")]
    times = measure(
        [
            _contender(
                STACKED, state, joined, lambda: dcp_rs.load(state, path, views=views, no_dist=True)
            ),
            _contender(ALONE, alone, experts, lambda: dcp_rs.load(alone, path, no_dist=True)),
        ],
        **context.pairs,
    )
    what = f"{EXPERTS} experts, {size_of(joined['experts.w'].nbytes)}"
    return [versus(f"Stack, {what}", times, STACKED, ALONE, reach=0.9, stretch=0.95)]


def _memory(context: Context) -> list[Row]:
    """Measure anonymous memory beyond the destination, of the first load of a process."""
    quantized, plain, expected = _fp8_and_plain(context, MANY_MATRICES)
    amount = size_of(sum(tensor.nbytes for tensor in expected.values()))
    del expected
    rows = []
    for warmth, prepare_files in (("warm", page_cache.warm), ("cold", page_cache.drop)):
        for kind, name in (("quantized", DEQUANTIZED), ("plain", PLAIN)):
            extra = []
            for _ in range(context.pairs["rounds"]):
                with worker("quantized_worker", quantized, plain) as process:
                    process.ask("prepare", kind)
                    prepare_files(quantized if kind == "quantized" else plain)
                    extra.append(extra_anonymous_bytes(process, "load") / 1e6)
                    process.ask("verify")
            case = f"FP8 blocks, {warmth}, extra anonymous memory while loading {amount} of bf16"
            rows.append(figure(case, name, "MB", extra, reach=100.0, stretch=64.0))
    return rows
