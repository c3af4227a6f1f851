"""A save to a store that takes over from an earlier one there: the store copies it, each step is whole by itself, and what is wrong is written anew and said."""

import dataclasses
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from support import assert_state_equal, run_ranks, stopped
from support.both import HAS_RANK_LOCAL, through_stock
from support.object_server import Fault, object_server
from support.second_reader import SecondReader
from support.states import blank, random_tensor
from support.stored import loaded, names

FROZEN = 3 << 20  # float32: several parts of an upload
REASON = "what could be reused of .* is written to .*: "


def state(step=0):
    """A frozen backbone, and a hundredth of it that is trained."""
    return {
        "backbone": random_tensor((FROZEN // 1024, 1024), torch.float32, 1),
        "transposed": random_tensor((30, 50), torch.bfloat16, 2).t(),
        "adapter": random_tensor((FROZEN // 100,), torch.float32, 100 + step),
        "value": {"of": ("a run", 1)},
        "step": step,
        "empty": torch.empty(0, 3),
    }


def nbytes(values):
    return sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor))


def save(server, step, parent=None, *, to=None, **options):
    """The report of a save of a step."""
    stored = {
        name: options.pop(name) for name in ("max_retries", "read_timeout") if name in options
    }
    parent = server.url(f"step-{parent}") if isinstance(parent, int) else parent
    writer = RsWriter(
        to or server.url(f"step-{step}"),
        parent=parent,
        storage_options=server.options(**stored),
        **options,
    )
    dcp.save(state(step), storage_writer=writer, planner=RsSavePlanner(), no_dist=True)
    return writer.report


def assert_holds(server, step, judge=None):
    """That a step is whole, and loads what was saved (or what stock torch does)."""
    want = state(step) if judge is None else through_stock(state(step), judge)
    assert_state_equal(loaded(server, state(step), f"step-{step}"), want)
    assert dcp_rs.verify(server.url(f"step-{step}"), storage_options=server.options()).ok


def remove(server, step):
    for key in server.keys(f"step-{step}/"):
        del server.objects[key]


def sent(server, since=0):
    """Bytes of bodies."""
    return sum(request.length for request in server.asked()[since:])


def is_data(request):
    return request.kind == "put" and request.key.endswith(".safetensors")


def copies(request):
    return request.kind == "copy"


def data_file(server, prefix):
    """The key of the largest data file under a prefix."""
    return max(server.keys(f"{prefix}/g"), key=lambda key: len(server.objects[key].data))


def replace(server, key, change):
    """Stores other bytes under a key."""
    data = bytearray(server.objects[key].data)
    change(data)
    server.put(key, bytes(data))


def flip(data):
    """In the backbone, which comes first."""
    data[len(data) // 2] ^= 1


# --- what is reused


def test_a_run_sends_what_changed_and_each_step_is_whole(server, tmp_path):
    first = save(server, 1)
    assert (first.bytes_reused, first.requests) == (
        0,
        sum(server.counts()[kind] for kind in ("part", "put")) - 2,
    )
    for step in range(2, 6):
        mark = len(server.requests)
        report = save(server, step, parent=step - 1)
        assert report.bytes_reused > nbytes(state()) - FROZEN * 4 // 50
        # The first save did not know what changes, so what does lies beside what does not.
        if step > 1:
            assert sent(server, mark) < 0.02 * nbytes(state())
        assert server.counts()["copy"] == step - 1
        assert report.requests == 2
        if step > 2:
            remove(server, step - 2)  # the grandparent
        assert_holds(server, step, tmp_path / f"stock-{step}")
    remove(server, 4)
    assert_holds(server, 5)
    assert server.open_uploads() == []
    assert [request.condition is not None for request in server.requests if copies(request)] == [
        True
    ] * 4


def test_a_step_that_is_downloaded_is_as_one_of_a_disk(server, tmp_path):
    save(server, 1)
    save(server, 2, parent=1)
    folder = tmp_path / "step-2"
    server.get_folder("step-2", folder)
    assert dcp_rs.verify(folder).ok
    SecondReader.open(folder)
    (folder / "index.dcprs").unlink()
    dcp_rs.index(folder)
    into = blank(state(2))
    dcp_rs.load(into, folder, verify=True, no_dist=True)
    assert_state_equal(into, state(2))


@settings(max_examples=6)
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([None, "[ab]"]),
)
@pytest.mark.slow
def test_any_history(tmp_path_factory, changes, rng, reuse):
    """Tensors change or stay, any earlier step is the parent, any step goes, and its index is lost."""
    root = tmp_path_factory.mktemp("history")
    with object_server() as server:
        seeds, history = [0] * 4, []
        for number, changed in enumerate(changes):
            # What is said not to change does not.
            seeds = [
                seed + (c and not (reuse and i < 2))
                for i, (seed, c) in enumerate(zip(seeds, changed, strict=True))
            ]
            history.append(
                {
                    name: random_tensor((70_000,), seed=10 * i + s)
                    for i, (name, s) in enumerate(zip("abcd", seeds, strict=True))
                }
            )
            parent = server.url(str(rng.randrange(number))) if number else None
            options = {"storage_options": server.options(), "no_dist": True}
            dcp_rs.save(
                dict(history[-1]), server.url(str(number)), parent=parent, reuse=reuse, **options
            )
        left = list(range(len(history)))
        while left:
            for number in left:
                assert_state_equal(loaded(server, history[number], str(number)), history[number])
            one = rng.choice(left)
            server.get_folder(str(one), root / str(one))
            SecondReader.open(root / str(one))
            (root / str(one) / "index.dcprs").unlink()
            dcp_rs.index(root / str(one))
            into = blank(history[one])
            dcp_rs.load(into, root / str(one), verify=True, no_dist=True)
            assert_state_equal(into, history[one])
            left.remove(gone := rng.choice(left))
            for key in server.keys(f"{gone}/"):
                del server.objects[key]


def test_files_are_copied_at_a_time(server):
    def begins(request):
        if copies(request):
            server.most_at_once = 0
        return copies(request)

    # What is said to stay is in a file of its own.
    save(server, 1, reuse="backbone")
    server.faults += [
        Fault(delay=1.0, matches=begins),
        Fault(delay=1.0, matches=copies, times=None),
    ]
    save(server, 1, parent=1, to=server.url("step-2"), reuse="backbone")
    assert server.counts()["copy"] == 2
    assert server.most_at_once >= 2
    server.faults.clear()
    remove(server, 1)
    assert_state_equal(loaded(server, state(1), "step-2"), state(1))


def test_a_save_over_its_own_parent(server):
    save(server, 1)
    report = save(server, 2, parent=1, to=server.url("step-1"))
    assert report.bytes_reused > FROZEN * 4
    assert_state_equal(loaded(server, state(2), "step-1"), state(2))
    assert {name[:9] for name in names(server, "step-1")} == {"g00000002", "index.dcp"}


def test_other_tools_know_of_it(server, tmp_path):
    save(server, 1)
    save(server, 2, parent=1)
    url, options = server.url("step-2"), server.options()
    dcp_rs.convert(url, tmp_path / "out", to="dcp", storage_options=options)
    into = blank(state(2))
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_state_equal(into, state(2))
    before = names(server, "step-2")
    dcp_rs.clean(url, yes=True, older_than=0, storage_options=options)
    assert names(server, "step-2") == before
    # One that is replaced takes its copies with it, and not those of others.
    dcp_rs.save({"other": torch.ones(1)}, url, storage_options=options, no_dist=True)
    assert len(names(server, "step-2")) == 2
    assert_holds(server, 1)


# --- ranks


def sharded(step):
    rank = dist.get_rank()
    return {
        f"own{rank}": random_tensor((300_000,), seed=10 + rank),
        "common": random_tensor((5000,), seed=2),
        f"trained{rank}": random_tensor((100,), seed=100 + 2 * step + rank),
        "step": step,
    }


def save_sharded(url, options, step, parent):
    path = f"{url}/{step}"
    parent = None if parent is None else f"{url}/{parent}"
    return dcp_rs.save(sharded(step), path, parent=parent, storage_options=options).report


def load_sharded(url, options, step):
    into = blank(sharded(step))
    dcp_rs.load(into, f"{url}/{step}", storage_options=options, verify=True)
    assert_state_equal(into, sharded(step))


def test_two_ranks(server):
    given_ = server.url("run"), server.options()
    run_ranks(2, save_sharded, *given_, 1, None)
    for step in (2, 3):
        mark = len(server.requests)
        reports = run_ranks(2, save_sharded, *given_, step, step - 1)
        assert all(report.bytes_reused >= 1_200_000 for report in reports)
        assert sent(server, mark) < 50_000
        for key in server.keys(f"run/{step - 1}/"):
            del server.objects[key]
        run_ranks(2, load_sharded, *given_, step)
    assert server.counts()["copy"] == 4


def save_rank_local(url, options):
    rank = dist.get_rank()
    values = {"w": random_tensor((5000,), seed=rank)}
    for number, parent in ((1, None), (2, f"{url}/1")):
        writer = RsWriter(f"{url}/{number}", parent=parent, storage_options=options)
        dcp.save(dict(values), storage_writer=writer, use_collectives=False)
    assert writer.report.bytes_reused == 20_000


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_a_rank_local_save_reuses_that_rank_s_own(server):
    run_ranks(2, save_rank_local, server.url("run"), server.options())


# --- parents that cannot be used


def lose_all(server):
    remove(server, 1)


def lose_index(server):
    replace(server, "step-1/index.dcprs", lambda data: data.__setitem__(slice(20, 400), bytes(380)))


def lose_file(server):
    del server.objects[data_file(server, "step-1")]


def cut_file(server):
    replace(server, data_file(server, "step-1"), lambda data: data.__delitem__(slice(-1, None)))


@pytest.mark.parametrize(
    "harm",
    [
        lose_all,
        cut_file,
        *(pytest.param(harm, marks=pytest.mark.slow) for harm in (lose_index, lose_file)),
    ],
)
def test_a_parent_that_cannot_be_used_is_named_and_all_is_written(server, harm):
    save(server, 1)
    harm(server)
    with pytest.warns(UserWarning, match=REASON + ".*step-1"):
        report = save(server, 2, parent=1)
    assert (report.bytes_reused, server.counts()["copy"]) == (0, 0)
    assert_holds(server, 2)


@pytest.mark.parametrize("ignores", [False, True])
def test_a_file_that_is_replaced_before_it_is_copied(server, ignores):
    """By one of the same length and the same header: the index of the parent still has its digests, so its bytes would be wrong in silence."""
    save(server, 1)
    server.ignores_conditions = ignores
    key = data_file(server, "step-1")

    def swap(request):
        if request.kind == "copy":
            replace(server, key, flip)
        return False

    server.faults.append(Fault(matches=swap, times=None))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = save(server, 2, parent=1)
    reasons = [str(each.message) for each in said if "could be reused" in str(each.message)]
    assert len(reasons) == 1
    assert ("replaced" if ignores else "412") in reasons[0]
    assert report.bytes_reused == 0
    server.faults.clear()
    assert_holds(server, 2)
    assert len(names(server, "step-2")) == 3  # what stays and what does not, and the index


@pytest.mark.parametrize("swapped", [False, True])
def test_a_store_with_weak_tags(server, swapped):
    """They are good for no condition: the source is looked at before and after."""
    save(server, 1)
    key = data_file(server, "step-1")
    weak = server.objects[key].tag = 'W/"1"'

    def swap(request):
        if swapped and request.kind == "copy":
            replace(server, key, flip)
        return False

    server.faults.append(Fault(matches=swap, times=None))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = save(server, 2, parent=1)
    assert any(weak in str(each.message) for each in said) == swapped
    assert (report.bytes_reused == 0) == swapped
    server.faults.clear()
    assert_holds(server, 2)


@pytest.mark.slow
def test_damage_is_found_where_it_is_looked_for(server):
    save(server, 1)
    replace(server, data_file(server, "step-1"), flip)
    # Nothing of what is reused is read, and the digests came along.
    save(server, 2, parent=1)
    assert not dcp_rs.verify(server.url("step-2"), storage_options=server.options()).ok
    with pytest.warns(UserWarning, match="at byte"):
        report = save(server, 3, parent=1, verify_reuse=True)
    assert report.bytes_reused < FROZEN * 4
    assert_holds(server, 3)


def test_a_store_and_a_file_system_share_nothing(server, tmp_path):
    save(server, 1)
    dcp_rs.save(state(1), tmp_path / "1", no_dist=True)
    with pytest.warns(
        UserWarning, match=REASON + "a store and a file system have no files in common"
    ):
        save(server, 2, parent=tmp_path / "1")
    assert_holds(server, 2)
    mark = len(server.requests)
    with pytest.warns(
        UserWarning, match=REASON + "a store and a file system have no files in common"
    ):
        dcp_rs.save(state(2), tmp_path / "2", parent=server.url("step-1"), no_dist=True)
    assert len(server.requests) == mark
    into = blank(state(2))
    dcp_rs.load(into, tmp_path / "2", no_dist=True)
    assert_state_equal(into, state(2))


@pytest.mark.parametrize(
    "parent", ["s3://another/step-1", "gs://bucket/step-1", "http://127.0.0.1:1/bucket/step-1"]
)
def test_another_bucket_or_store(server, parent):
    with pytest.warns(UserWarning, match=REASON + "it is in another bucket"):
        save(server, 2, parent=parent)
    assert_holds(server, 2)


# --- requests that fail


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 503, "done": True},
        {"status": 200, "code": "InternalError"},
        {"lose": True},
        pytest.param({"reset": True}, marks=pytest.mark.slow),
        pytest.param({"delay": 8.0}, marks=pytest.mark.slow),
        pytest.param({"status": 500, "code": "InternalError"}, marks=pytest.mark.slow),
        pytest.param(
            {"status": 500, "code": "InternalError", "done": True}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_passing_faults_of_a_copy_are_retried(server, fault):
    save(server, 1)
    server.faults.append(Fault(**fault, matches=copies))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=REASON)
        report = save(server, 2, parent=1, **({"read_timeout": 0.5} if "delay" in fault else {}))
    assert server.faults[0].times == 0
    assert report.bytes_reused > FROZEN * 4
    # What was done and not answered is found, and not copied again.
    is_found = "lose" in fault or fault.get("done")
    assert server.counts()["copy"] == (1 if is_found else 2)
    assert_holds(server, 2)
    remove(server, 1)
    assert_holds(server, 2)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "403 AccessDenied"),
        pytest.param(501, "NotImplemented", "501 NotImplemented", marks=pytest.mark.slow),
        pytest.param(400, "InvalidRequest", "400 InvalidRequest", marks=pytest.mark.slow),
        pytest.param(404, "NoSuchKey", "404 NoSuchKey", marks=pytest.mark.slow),
        pytest.param(412, "PreconditionFailed", "412 PreconditionFailed", marks=pytest.mark.slow),
        (200, "AccessDenied", "it is missing"),  # S3 answers before it has copied
        (503, "SlowDown", "503 SlowDown"),
    ],
)
def test_lasting_fault_of_a_copy_is_named_and_all_is_written(server, status, code, said):
    save(server, 1)
    server.faults.append(Fault(status=status, code=code, matches=copies, times=None))
    with pytest.warns(UserWarning, match=REASON + f".*{said}") as caught:
        report = save(server, 2, parent=1, max_retries=1)
    assert len([each for each in caught if "could be reused" in str(each.message)]) == 1
    assert report.bytes_reused == 0
    server.faults.clear()
    assert_holds(server, 2)
    before = names(server, "step-2")
    # What was written is in files that the next save takes over.
    assert save(server, 3, parent=2).bytes_reused > FROZEN * 4
    assert_holds(server, 3)
    assert names(server, "step-2") == before


@pytest.mark.parametrize("key", ["", "step-2/index.dcprs"], ids=["data", "commit"])
def test_failed_save_leaves_nothing(server, key):
    save(server, 1)
    server.faults.append(
        Fault(
            status=403,
            code="AccessDenied",
            matches=lambda r: r.kind == "put" and r.key.endswith(key),
            times=None,
        )
    )
    where = {"parent": server.url("step-1"), "storage_options": server.options()}
    with pytest.raises(dcp_rs.errors.StoragePermissionError):
        dcp_rs.save(state(2), server.url("step-2"), no_dist=True, **where)
    assert server.counts()["copy"] == 1
    assert names(server, "step-2") == []
    server.faults.clear()
    assert_holds(server, 1)


def begin_save(server, matches):
    where = f"{server.url('step-2')!r}, parent={server.url('step-1')!r}"
    call = f"dcp_rs.save(state(2), {where}, storage_options={server.options()!r}, no_dist=True)"
    return stopped.begin(server, matches, call, "from test_reuse import state")


def test_ctrl_c_ends_a_copy(server):
    save(server, 1)
    server.faults.append(Fault(delay=60.0, times=None, matches=copies))
    stopped.interrupt(begin_save(server, copies))
    assert names(server, "step-2") == []


@pytest.mark.slow
def test_a_kill_leaves_what_clean_removes(server):
    save(server, 1)
    server.faults.append(Fault(delay=30.0, times=None, matches=is_data))
    process = begin_save(server, copies)
    deadline = time.monotonic() + 60
    while not names(server, "step-2"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    server.faults.clear()
    assert len(names(server, "step-2")) == 1  # the copy
    assert_holds(server, 1)
    save(server, 2, parent=1)
    for key in server.keys("step-2/"):
        server.objects[key] = dataclasses.replace(server.objects[key], modified=time.time() - 3600)
    dcp_rs.clean(server.url("step-2"), yes=True, older_than=60, storage_options=server.options())
    assert len(names(server, "step-2")) == 3
    assert_holds(server, 2)
