"""Tensors cut to the parts that are read at once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_rs.checkpoint.blocks import BLOCK_BYTES, Region, cut, rectangles
from support.formats import item


@given(
    sizes=st.lists(st.integers(1, 5), max_size=4),
    data=st.data(),
)
def test_rectangles_are_the_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    begin = data.draw(st.integers(0, whole.numel() - 1))
    count = data.draw(st.integers(0, whole.numel() - begin))
    got = []
    for offsets, extent in rectangles(sizes, begin, count):
        part = whole
        for dim, (offset, size) in enumerate(zip(offsets, extent, strict=True)):
            part = part.narrow(dim, offset, size)
        got += part.flatten().tolist()
    assert got == list(range(begin, begin + count))


@given(
    numels=st.lists(st.integers(0, 12 << 20), max_size=6),
    dtypes=st.lists(
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2]), min_size=6, max_size=6
    ),
    to=st.sampled_from([torch.float64, torch.bfloat16, torch.float8_e5m2]),
)
def test_parts_fill_slabs_and_keep_the_rules_of_a_save(numels, dtypes, to) -> None:
    regions = [Region(item(str(i), n, d), None, to) for i, (n, d) in enumerate(zip(numels, dtypes, strict=False))]
    slab = 16 << 20
    reached = [0] * len(regions)
    for parts in cut(regions, slab):
        end = 0
        for part in parts:
            region = regions[part.region]
            assert part.slab_at >= end
            end = part.slab_at + part.count * region.source_dtype.itemsize
            assert end <= slab
            assert part.begin == reached[part.region]
            reached[part.region] += part.count
            if reached[part.region] < region.numel:
                assert part.count * region.dtype.itemsize % BLOCK_BYTES == 0
            assert part.count > 0
    assert reached == [region.numel for region in regions]
