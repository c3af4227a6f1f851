"""What the tests' own server says of writes: what S3 would, to a client that is not ours."""

import pytest

from support.object_server import Fault

obstore = pytest.importorskip("obstore")
from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: E402

PART = 5 << 20


@pytest.fixture
def store(server):
    config = {name: value for name, value in server.options().items() if name.startswith("aws_")}
    config.pop("aws_allow_http")
    retry = {"max_retries": 0}
    return obstore.store.S3Store(
        server.bucket, config=config, client_options={"allow_http": True}, retry_config=retry
    )


def test_conditions_of_a_put(store, server):
    tag = obstore.put(store, "a", b"one", mode="create", use_multipart=False)["e_tag"]
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"two", mode="create", use_multipart=False)
    obstore.put(store, "a", b"three", mode={"e_tag": tag}, use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.put(store, "a", b"four", mode={"e_tag": tag}, use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.put(store, "b", b"four", mode={"e_tag": tag}, use_multipart=False)
    assert server.objects["a"].data == b"three"
    assert [request.condition for request in server.asked("PUT")][:2] == ["If-None-Match: *"] * 2
    assert server.counts() == {"put": 5}


def test_conditions_that_a_store_does_not_have(store, server):
    obstore.put(store, "a", b"one", use_multipart=False)
    server.ignores_conditions = True
    obstore.put(store, "a", b"two", mode="create", use_multipart=False)
    assert server.objects["a"].data == b"two"
    server.ignores_conditions, server.refuses_conditions = False, True
    with pytest.raises(Exception, match="501"):
        obstore.put(store, "b", b"one", mode="create", use_multipart=False)
    assert "b" not in server.objects


def test_an_upload_in_parts(store, server):
    data = bytes(range(256)) * (2 * PART // 256) + b"end"
    tag = obstore.put(store, "big", data, use_multipart=True, chunk_size=PART)["e_tag"]
    assert server.objects["big"].data == data
    assert server.objects["big"].tag == tag
    assert tag.endswith('-3"')
    assert server.counts() == {"create": 1, "part": 3, "complete": 1}
    assert server.open_uploads() == []


def test_an_upload_that_fails_is_open_until_it_is_aborted(store, server):
    server.faults.append(
        Fault(status=200, code="InternalError", matches=lambda request: request.kind == "complete")
    )
    with pytest.raises(Exception, match="InternalError"):
        obstore.put(store, "big", bytes(PART + 1), use_multipart=True, chunk_size=PART)
    assert "big" not in server.objects
    assert server.counts()["abort"] + len(server.open_uploads()) == 1


def test_parts_that_are_too_short(store, server):
    with pytest.raises(Exception, match="EntityTooSmall"):
        obstore.put(store, "big", bytes(3000), use_multipart=True, chunk_size=1000)
    assert "big" not in server.objects


@pytest.mark.parametrize(
    ("fault", "there"),
    [
        (Fault(lose=True), True),
        (Fault(status=500, done=True), True),
        (Fault(status=500), False),
        (Fault(status=409, code="ConditionalRequestConflict"), False),
        (Fault(reset=True), False),
        (Fault(broken=100_000), False),
    ],
    ids=["lost", "500 after", "500", "409", "reset", "broken"],
)
def test_object_after_a_failed_put(store, server, fault, there):
    server.faults.append(fault)
    with pytest.raises(Exception, match=r".+"):
        obstore.put(store, "a", bytes(1 << 20), mode="create", use_multipart=False)
    assert ("a" in server.objects) is there


def test_bulk_delete(store, server):
    names = ["a&b", "c", "kept", "x/y"]
    for name in names:
        server.put(name, b"x")
    server.undeletable.add("kept")
    with pytest.raises(Exception, match="AccessDenied"):
        obstore.delete(store, names)
    assert server.keys() == ["kept"]
    assert server.counts() == {"bulk delete": 1}


def test_folders_are_listed_once_though_pages_are_short(store, server):
    for i in range(7):
        server.put(f"runs/step-{i}/index.dcprs", b"x")
        server.put(f"runs/step-{i}/data", b"x")
    server.put("runs/note", b"xyz")
    listed = obstore.list_with_delimiter(store, "runs")
    assert sorted(listed["common_prefixes"]) == [f"runs/step-{i}" for i in range(7)]
    assert [(found["path"], found["size"]) for found in listed["objects"]] == [("runs/note", 3)]
    assert sum(len(page) for page in obstore.list(store, "runs")) == 15
