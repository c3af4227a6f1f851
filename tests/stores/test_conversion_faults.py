"""``convert`` to a store whose answers are lost, or do not come, and beside others who write there."""

import io
import os
import signal
import threading
import time
import warnings

import pytest
import torch
from safetensors.torch import load

import dcp_rs
from dcp_rs.errors import (
    CheckpointExistsError,
    StorageNotFoundError,
    StoragePermissionError,
    StoragePreconditionError,
    StorageUnclearError,
)
from support.object_server import Fault

CLAIM = "copy/.dcp-rs-converting"
#: What a store answers where it did nothing.
NOT_DONE = {
    "500": {"status": 500, "code": "InternalError"},
    "503": {"status": 503},
    "reset": {"reset": True},
    "200 that is none": {"status": 200, "code": "InternalError"},
}
#: And where it did it.
DONE = {
    "lost": {"lose": True},
    "500": {"status": 500, "code": "InternalError", "done": True},
    "503": {"status": 503, "done": True},
}
FORMATS = [("safetensors", "out/model.safetensors"), ("torch", "out/all.pt")]


def converted(folder, server, out, *, retries=8, **how):
    options = server.options(max_retries=retries)
    return dcp_rs.convert(folder, server.url(out), storage_options=options, **how)


def held(server, key):
    """The number that a result is full of."""
    data = server.objects[key].data
    tensors = torch.load(io.BytesIO(data)) if key.endswith(".pt") else load(data)
    assert tensors["w"].eq(tensors["w"][0]).all()
    return tensors["w"][0].item()


def folders(tmp_path, count):
    for number in (1, 2):
        dcp_rs.save({"w": torch.full((count,), float(number))}, tmp_path / str(number))
    return tmp_path / "1", tmp_path / "2"


@pytest.fixture
def two(tmp_path):
    """Two checkpoints of the same length: full of 1, and of 2. They are sent in parts."""
    return folders(tmp_path, 3 << 20)


@pytest.fixture
def small(tmp_path):
    """The same, sent in one piece."""
    return folders(tmp_path, 1000)


def failing(kind, what, times=None, key=""):
    return Fault(
        **what,
        times=times,
        matches=lambda request: request.kind == kind and request.key.endswith(key),
    )


class TestOverAnother:
    """One file in place of another of its length: the length does not tell them apart."""

    @pytest.mark.parametrize(("to", "out"), FORMATS)
    @pytest.mark.parametrize("what", NOT_DONE.values(), ids=NOT_DONE)
    def test_what_was_not_done_is_done_again(self, two, server, to, out, what):
        """It was taken for done: the old one had the length of the new one."""
        old, new = two
        converted(old, server, out, to=to)
        server.faults.append(failing("complete", what, times=1))
        converted(new, server, out, to=to, overwrite=True)
        assert held(server, out) == 2
        assert server.open_uploads() == []

    @pytest.mark.parametrize("what", NOT_DONE.values(), ids=NOT_DONE)
    def test_what_cannot_be_told_is_no_success(self, two, server, what):
        old, new = two
        to, out = FORMATS[0]
        converted(old, server, out, to=to)
        server.faults.append(failing("complete", what))
        with pytest.raises(StorageUnclearError, match="after 3 attempts"):
            converted(new, server, out, to=to, overwrite=True, retries=2)
        assert held(server, out) == 1
        assert server.open_uploads() == []

    def test_an_upload_that_the_store_forgot(self, two, server):
        """As a rule for uploads that are old removes them."""
        old, new = two
        to, out = FORMATS[0]
        converted(old, server, out, to=to)
        server.faults.append(failing("complete", {"status": 404, "code": "NoSuchUpload"}))
        with pytest.raises(StorageNotFoundError, match="no such upload"):
            converted(new, server, out, to=to, overwrite=True)
        assert held(server, out) == 1
        assert server.open_uploads() == []

    @pytest.mark.parametrize("remembers", [False, True])
    @pytest.mark.parametrize("what", DONE.values(), ids=DONE)
    def test_what_was_done_is_found(self, two, server, what, remembers):
        old, new = two
        to, out = FORMATS[0]
        server.remembers_uploads = remembers
        converted(old, server, out, to=to)
        server.faults.append(failing("complete", what, times=1))
        converted(new, server, out, to=to, overwrite=True)
        assert held(server, out) == 2

    def test_in_one_piece(self, small, server):
        old, new = small
        to, out = FORMATS[0]
        converted(old, server, out, to=to)
        server.faults.append(failing("put", {"status": 500}))
        with pytest.raises(StorageUnclearError):
            converted(new, server, out, to=to, overwrite=True, retries=2)
        assert held(server, out) == 1
        server.faults[:] = [failing("put", {"status": 500, "done": True})]
        converted(new, server, out, to=to, overwrite=True, retries=2)
        assert held(server, out) == 2


class TestBesideAnother:
    """One file where there was none, without ``overwrite``."""

    @pytest.mark.parametrize(
        "store", [{}, {"ignores_conditions": True}, {"refuses_conditions": True}]
    )
    @pytest.mark.parametrize("size", ["two", "small"])
    def test_one_that_appears_meanwhile_stays(self, request, server, size, store):
        """It was replaced."""
        mine, theirs = request.getfixturevalue(size)
        out = "m.safetensors"
        for name, value in store.items():
            setattr(server, name, value)
        done = []

        def other(*_):
            if not done:
                done.append(True)
                converted(theirs, server, out)

        with pytest.raises(StoragePreconditionError):
            converted(mine, server, out, progress=other)
        assert done
        assert held(server, out) == 2
        assert server.open_uploads() == []

    @pytest.mark.parametrize(("size", "kind"), [("two", "complete"), ("small", "put")])
    def test_one_that_appears_at_the_last_moment_stays(self, request, server, size, kind):
        mine, _ = request.getfixturevalue(size)

        def stored(asked):
            if asked.kind == kind and asked.key == "m.safetensors":
                server.put("m.safetensors", b"theirs")
            return False

        server.faults.append(Fault(matches=stored))
        with pytest.raises(StoragePreconditionError):
            converted(mine, server, "m.safetensors")
        assert server.objects["m.safetensors"].data == b"theirs"
        assert server.open_uploads() == []

    @pytest.mark.parametrize(("size", "kind"), [("two", "complete"), ("small", "put")])
    @pytest.mark.parametrize("what", DONE.values(), ids=DONE)
    def test_what_was_done_is_found(self, request, server, size, kind, what):
        """Tried again, it meets itself."""
        mine, _ = request.getfixturevalue(size)
        server.faults.append(failing(kind, what, times=1, key="m.safetensors"))
        converted(mine, server, "m.safetensors")
        assert held(server, "m.safetensors") == 1


LAST = {"dcp": ".metadata", "safetensors": ".index.json"}


def to_a_folder(folder, server, to="dcp", **how):
    return converted(folder, server, "copy", to=to, shards=2, **how)


@pytest.fixture
def several(tmp_path):
    """A checkpoint of several tensors, all full of 1."""
    dcp_rs.save({f"w{i}": torch.ones(1000) for i in range(4)}, tmp_path / "several")
    return tmp_path / "several"


def assert_is_there(server):
    with dcp_rs.open(server.url("copy"), storage_options=server.options()) as checkpoint:
        assert {name: checkpoint[name].sum().item() for name in checkpoint} == {
            f"w{i}": 1000 for i in range(4)
        }


def is_claimed(server):
    return CLAIM in server.objects


class TestTheLastFile:
    """The one that names the others."""

    @pytest.mark.parametrize("to", LAST)
    @pytest.mark.parametrize("what", DONE.values(), ids=DONE)
    def test_a_lost_answer_is_found_out_about(self, several, server, to, what):
        """The data files were removed, and what names them stayed."""
        server.faults.append(failing("put", what, times=1, key=LAST[to]))
        to_a_folder(several, server, to)
        assert_is_there(server)
        assert not is_claimed(server)

    @pytest.mark.parametrize("to", LAST)
    def test_what_was_refused_leaves_nothing(self, several, server, to):
        server.faults.append(failing("put", {"status": 403, "code": "AccessDenied"}, key=LAST[to]))
        with pytest.raises(StoragePermissionError):
            to_a_folder(several, server, to)
        assert server.keys() == []

    def test_what_is_not_known_removes_nothing(self, several, server):
        server.faults.append(failing("put", {"status": 500}, key=".metadata"))
        with pytest.raises(StorageUnclearError):
            to_a_folder(several, server, retries=1)
        assert server.keys() == ["copy/__0_0.distcp", "copy/__1_0.distcp"]

    def test_nobody_answers_any_more(self, several, server):
        """It is stored, and neither the answer nor a look tells that."""
        gone = []

        def is_gone(asked):
            gone.extend([True] * (asked.kind == "put" and asked.key.endswith(".metadata")))
            return bool(gone)

        server.faults.append(Fault(lose=True, times=None, matches=is_gone))
        with pytest.raises(StorageUnclearError):
            to_a_folder(several, server, retries=1)
        server.faults.clear()
        assert_is_there(server)

    def test_ctrl_c_while_it_is_stored(self, several, server):
        """The data files were removed under what names them."""

        def stored(asked):
            if asked.kind == "put" and asked.key.endswith(".metadata"):
                server.put("copy/.metadata", b"by the store")
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(2)
            return False

        server.faults.append(Fault(matches=stored))
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a run in the background ignores it
        try:
            with pytest.raises(KeyboardInterrupt) as raised:
                to_a_folder(several, server)
        finally:
            signal.signal(signal.SIGINT, before)
        assert isinstance(raised.value.__cause__, StorageUnclearError)
        assert set(server.keys()) >= {"copy/.metadata", "copy/__0_0.distcp", "copy/__1_0.distcp"}


class TestTheClaim:
    """What keeps a second conversion out of a folder."""

    @pytest.mark.parametrize("what", DONE.values(), ids=DONE)
    def test_a_lost_answer_does_not_block_the_folder(self, several, server, what):
        """It was taken for another's, and stayed."""
        server.faults.append(failing("put", what, times=1, key=CLAIM))
        to_a_folder(several, server)
        assert_is_there(server)
        assert not is_claimed(server)

    @pytest.mark.parametrize("store", ["ignores_new", "ignores_conditions", "refuses_conditions"])
    def test_two_at_a_time_on_a_store_that_ignores_conditions(self, several, server, store):
        """They mixed their files, and both were told of success."""
        setattr(server, store, True)
        told = []

        def progress(*_):
            if not told:
                told.append(True)
                with pytest.raises(CheckpointExistsError, match="under way"):
                    to_a_folder(several, server)

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            to_a_folder(several, server, progress=progress)
        assert told
        assert any("ignores conditions" in str(warning.message) for warning in warned) == (
            store != "ignores_new"
        )
        assert_is_there(server)
        assert not is_claimed(server)

    def test_one_that_another_took_before_anything_was_sent(self, several, server):
        def progress(*_):
            server.put(CLAIM, b"theirs")

        with pytest.raises(StoragePreconditionError, match="no longer belongs to this conversion"):
            to_a_folder(several, server, progress=progress)
        assert server.keys() == [CLAIM]
        assert server.objects[CLAIM].data == b"theirs"

    def test_one_that_another_took_meanwhile(self, several, server):
        """What is there may be theirs: nothing is removed, and nothing names it."""

        def taken(asked):
            if asked.kind == "put" and asked.key.endswith("__1_0.distcp"):
                server.put(CLAIM, b"theirs")
            return False

        server.faults.append(Fault(matches=taken))
        with pytest.raises(StoragePreconditionError, match="no longer belongs to this conversion"):
            to_a_folder(several, server)
        assert server.keys() == [CLAIM, "copy/__0_0.distcp", "copy/__1_0.distcp"]
        assert server.objects[CLAIM].data == b"theirs"

    def test_one_that_another_took_at_the_end_stays(self, several, server):
        def taken(asked):
            if asked.kind == "put" and asked.key.endswith(".metadata"):
                server.put(CLAIM, b"theirs")
            return False

        server.faults.append(Fault(matches=taken))
        to_a_folder(several, server)
        assert_is_there(server)
        assert server.objects[CLAIM].data == b"theirs"


@pytest.mark.parametrize("include", ["a", "b"])
def test_a_file_of_the_source_is_not_replaced(tmp_path, server, include):
    """The source was left without a tensor."""
    dcp_rs.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "state")
    dcp_rs.convert(tmp_path / "state", tmp_path / "hf", to="safetensors", shards=2)
    server.put_folder(tmp_path / "hf", "hf")
    before = {key: stored.tag for key, stored in server.objects.items()}
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        for to in ("safetensors", "dcp-rs"):
            with pytest.raises(ValueError, match="would be lost"):
                converted(
                    server.url("hf"), server, f"hf/{file}", include=include, overwrite=True, to=to
                )
    assert {key: stored.tag for key, stored in server.objects.items()} == before
