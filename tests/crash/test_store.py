"""Saves to a store that are killed: what is there is the old checkpoint or the new one, whole, and `clean` removes the rest.

`make crash` does the same more often.
"""

import pytest

from crash.process import kills
from crash.store import MOMENTS, Store


@pytest.mark.slow  # tests/stores kill saves, too
@pytest.mark.timeout(900)
def test_a_killed_save_to_a_store_leaves_the_old_checkpoint_or_the_new(tmp_path):
    one, four = kills("--store", "--kills", "14", "--kills-of-four", "2", "--folder", tmp_path)
    assert (one["kills"], four["kills"], four["one_rank_only"]) == (14, 2, 1)
    assert set(one["by_way"]) == set(Store.ways)
    assert set(one["by_request"]) == set(MOMENTS)
    assert one["kept_old"] + one["became_new"] + one["finished_first"] == 14
    assert one["kept_old"] > 0
    assert one["most_strays"] > 0
