"""Folders of stock DCP with tensors that torch conjugates, negates or repeats only when they are asked for."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from support import assert_state_equal
from support.both import load_stock, save_stock


def _numbers(dtype):
    real = torch.arange(1.0, 61.0).reshape(6, 10)
    return torch.complex(real, -real / 7).to(dtype)


# Torch stores a view as one where its memory is as long as the tensor.
STATE = {
    "conj": _numbers(torch.complex64).conj(),
    "conj.128": _numbers(torch.complex128).conj(),
    "expanded": _numbers(torch.complex64)[:1].expand(6, 10),
    "expanded.columns": torch.arange(60, dtype=torch.int16).reshape(6, 10)[:, :1].expand(6, 10),
    "expanded.conj": _numbers(torch.complex128)[2, 3].expand(6, 10).conj(),
    "half": _numbers(torch.complex32).conj(),
    "imag": _numbers(torch.complex64).conj().imag,  # negated
    "one": _numbers(torch.complex64).conj()[2, 3],
    "plain": _numbers(torch.complex64),
    "transposed": _numbers(torch.complex64).conj().t(),
    "view": _numbers(torch.complex128).conj()[1:4, ::3].imag,
    "windows": torch.arange(60.0).as_strided((6, 10), (1, 1)),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    path = tmp_path_factory.mktemp("lazy") / "stock"
    assert STATE["conj"].is_conj()
    assert STATE["imag"].is_neg()
    save_stock(STATE, path)
    return path


def blank():
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in STATE.items()}


def resolved(state):
    return {name: value.resolve_conj().resolve_neg() for name, value in state.items()}


def test_loads_as_stock_does(stock):
    want = load_stock(blank(), stock)
    assert_state_equal(want, resolved(STATE))
    for planner in (RsLoadPlanner(), dcp.DefaultLoadPlanner()):
        for options in ({}, {"io": "direct"}, {"io": "buffered"}, {"max_inflight_bytes": 1}):
            got = blank()
            dcp.load(got, storage_reader=RsReader(stock, **options), planner=planner, no_dist=True)
            assert_state_equal(got, want)


def test_into_other_types_and_views(stock):
    def templates():
        conjugated = torch.zeros(6, 10, dtype=torch.complex64).conj()
        return {
            "conj": torch.zeros(10, 6, dtype=torch.complex128).t(),
            "conj.128": torch.zeros(6, 10, dtype=torch.complex64),
            "expanded": torch.zeros(6, 10, dtype=torch.complex128),
            "expanded.columns": torch.zeros(10, 6, dtype=torch.int16).t(),
            "imag": torch.zeros(6, 10, dtype=torch.bfloat16),
            "plain": conjugated,
            "transposed": torch.zeros(20, 12, dtype=torch.complex64)[::2, ::2],
        }

    want, got = templates(), templates()
    load_stock(want, stock)
    dcp_rs.load(got, stock, dtype_policy="cast")
    assert_state_equal(resolved(got), resolved(want))


def test_opened_sliced_streamed_and_indexed(stock, tmp_path):
    want = resolved(STATE)
    for index in (False, True):
        if index:
            dcp_rs.index(stock)
        with dcp_rs.open(stock) as checkpoint:
            assert_state_equal(dict(checkpoint.items()), want)
            for name, value in want.items():
                if value.dim():
                    assert_state_equal(checkpoint.get_slice(name)[1:3, 1:], value[1:3, 1:])
            assert_state_equal(dict(checkpoint.stream()), want)
        dcp_rs.load(got := blank(), stock)
        assert_state_equal(got, want)
    (stock / "index.dcprs").unlink()


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_converted(stock, tmp_path, to):
    report = dcp_rs.convert(stock, tmp_path / "new", to=to, skip_unsupported=to == "safetensors")
    want = {name: value for name, value in resolved(STATE).items() if name in report.written}
    assert len(want) > 4
    if to == "torch":
        got = torch.load(tmp_path / "new")
    else:
        with dcp_rs.open(tmp_path / "new") as checkpoint:
            got = {name: value.clone() for name, value in checkpoint.items()}
    assert_state_equal(dict(got), want)
