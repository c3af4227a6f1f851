"""Tensors cut to the parts that are read at once."""

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_rs.tensors.regions import ALIGNMENT, cut, narrow, read_ahead, unflatten


@given(
    sizes=st.lists(st.integers(1, 5), max_size=4),
    data=st.data(),
)
def test_rectangles_are_the_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    begin = data.draw(st.integers(0, whole.numel() - 1))
    count = data.draw(st.integers(0, whole.numel() - begin))
    got = []
    for offsets, part in unflatten(sizes, begin, torch.arange(begin, begin + count)):
        assert torch.equal(part, narrow(whole, offsets, part.shape))
        got += part.flatten().tolist()
    assert got == list(range(begin, begin + count))


@given(
    numels=st.lists(st.integers(0, 12 << 20), max_size=6),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=6, max_size=6),
    step=st.sampled_from([1, 512, 1 << 17]),
)
def test_cuts_fill_slabs_and_are_at_multiples_of_a_step(numels, sizes, step) -> None:
    slab = 16 << 20
    reached = [0] * len(numels)
    for cuts in cut(
        [(numel, size, step) for numel, size in zip(numels, sizes, strict=False)], slab
    ):
        end = 0
        for part in cuts:
            assert part.at >= end
            assert part.at % ALIGNMENT == 0
            end = part.at + part.count * sizes[part.number]
            assert end <= slab
            assert part.begin == reached[part.number]
            reached[part.number] += part.count
            assert reached[part.number] == numels[part.number] or part.count % step == 0
            assert part.count > 0
    assert reached == numels


def test_the_next_piece_is_read_while_one_is_used() -> None:
    buffers: list[int | None] = [None, None]

    def read(piece: int, turn: int) -> int:
        buffers[turn] = piece
        return turn

    for piece, turn in read_ahead(range(7), read):
        time.sleep(0.02)  # the next one is there by now
        assert buffers[turn] == piece
        assert piece == 6 or buffers[1 - turn] == piece + 1
