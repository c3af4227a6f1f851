"""Verification where there are no digests."""

import warnings

import pytest

import dcp_rs
from support import blank
from support.both import load_rs, save_stock
from support.failures import STATE

VERIFYING = [
    lambda path: dcp_rs.load(blank(STATE), path, no_dist=True, verify=True),
    lambda path: dcp_rs.open(path, verify=True).close(),
    lambda path: load_rs(blank(STATE), path, verify=True),
]


@pytest.mark.parametrize("use", VERIFYING)
def test_verifying_without_digests_warns(tmp_path, use):
    save_stock(STATE, tmp_path / "stock")
    with pytest.warns(
        UserWarning, match=f"verify=True checks nothing in {tmp_path / 'stock'}: it has no digests"
    ):
        use(tmp_path / "stock")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed")
        # What the warning says to do does it.
        dcp_rs.convert(tmp_path / "stock", tmp_path / "converted")
        use(tmp_path / "converted")
        dcp_rs.index(tmp_path / "stock", digests=True)
        use(tmp_path / "stock")
