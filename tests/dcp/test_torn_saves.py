"""A tensor that changes while it is saved: digests are of the bytes that are in the file.

Digests were once taken of the tensor, which was then read a second time to be written. Such a save
failed ``verify=True``, and a later save with ``parent=`` took over bytes that were not the
tensor's: its loads were wrong without a word.
"""

import threading

import pytest
import torch

import dcp_rs

# Of no whole number of pages: blocks of digests begin in one write and end in the next.
ELEMENTS = (2 << 20) + 5


def save(tensors, path, parent=None):
    """How many bytes were taken over from the parent."""
    return dcp_rs.save(
        dict(tensors), path, parent=parent, overwrite=True, fsync=False
    ).report.bytes_reused


def assert_loads(path, tensors):
    into = {name: torch.full_like(tensor, 99) for name, tensor in tensors.items()}
    dcp_rs.load(into, path, verify=True)
    for name, tensor in tensors.items():
        assert torch.equal(into[name], tensor), name


def torn_saves(tmp_path, rounds):
    """Later loads of saves whose parents are torn, and the bytes that they took over."""
    tensors = {name: torch.zeros(ELEMENTS, dtype=torch.uint8) for name in ("a", "b")}
    loads = reused = torn = 0
    for _ in range(rounds):
        for tensor in tensors.values():
            tensor.fill_(0)
        stopped = threading.Event()

        def change(stopped=stopped):
            while not stopped.is_set():
                for value in (1, 0):
                    for tensor in tensors.values():
                        tensor.fill_(value)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            save(tensors, tmp_path / "torn")
        finally:
            stopped.set()
            thread.join()
        report = dcp_rs.verify(tmp_path / "torn")
        assert report.ok, report
        into = {name: torch.full_like(tensor, 99) for name, tensor in tensors.items()}
        dcp_rs.load(into, tmp_path / "torn", verify=True)
        torn += any(bool((tensor != tensor[0]).any()) for tensor in into.values())
        for value in (0, 1):
            for tensor in tensors.values():
                tensor.fill_(value)
            reused += save(tensors, tmp_path / "later", parent=tmp_path / "torn")
            assert_loads(tmp_path / "later", tensors)
            loads += 1
    return loads, reused, torn


def test_digests_are_of_what_is_in_the_file(tmp_path):
    torn_saves(tmp_path, 4)


@pytest.mark.slow
def test_a_thousand_loads_after_torn_saves_are_right(tmp_path):
    loads, _, torn = torn_saves(tmp_path, 500)
    assert loads == 1000
    assert torn > 0, "no save met a change: nothing was tested"
