"""How the tasks of a conversion are split among files."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_rs.conversion.job import Task, split
from support.formats import item


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), count=st.integers(1, 9))
def test_split_is_even_and_in_order(sizes: list[int], count: int) -> None:
    tasks = [
        Task(item(str(i), n, torch.uint8), str(i), torch.uint8, (str(i),))
        for i, n in enumerate(sizes)
    ]
    runs = split(tasks, count)
    assert [task for run in runs for task in run] == tasks
    assert len(runs) == max(1, min(count, len(tasks)))
    assert all(runs) or not tasks
    biggest, mean = max(sizes, default=0), sum(sizes) / len(runs)
    assert all(sum(task.nbytes for task in run) <= mean + 2 * biggest + 1 for run in runs)
