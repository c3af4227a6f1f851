"""Odd and hostile files are read, or refused by a typed error that names the file, in bounded memory."""

import pytest

from support.odd_files import LEAST, ODD, peak, read_all, reset, size


@pytest.mark.parametrize("name", ODD)
def test_odd_files(tmp_path, name):
    """A tensor of 1,000 dimensions in a safetensors file was a PlanError without the file's name."""
    odd = ODD[name]
    path = odd.make(tmp_path, 10_000)
    reset()
    before = peak()
    if odd.error is None:
        read_all(path)
    else:
        with pytest.raises(odd.error, match=odd.says) as raised:
            read_all(path)
        # A value is named by its entry.
        assert str(path) in str(raised.value) or raised.value.tensor == "n"
    assert peak() - before <= max(LEAST, 40 * size(tmp_path))
