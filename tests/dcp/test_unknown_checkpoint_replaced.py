"""A save over a checkpoint that its process neither loaded nor saved: it replaced one without a word."""

import re
import warnings

import pytest
import torch

import dcp_rs
from support import run_ranks
from support.both import load_rs, save_rs
from support.object_server import object_server

STATE = {"w": torch.ones(3)}
REPLACES = r"this save replaces the checkpoint"


def save_elsewhere(path, save=dcp_rs.save):
    """Let another process have saved a checkpoint: what this one saved is moved there."""
    save(dict(STATE), elsewhere := path.with_name("elsewhere"))
    elsewhere.rename(path)


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=REPLACES)
        yield


@pytest.mark.parametrize("save", [dcp_rs.save, save_rs])
def test_first_save_of_a_process_warns_and_later_ones_do_not(ckpt, save):
    save_elsewhere(ckpt, save)
    with pytest.warns(UserWarning, match=rf"{REPLACES} at {ckpt}"):
        save(STATE, ckpt)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=REPLACES)
        save(STATE, ckpt)


def test_background_save_warns(ckpt):
    save_elsewhere(ckpt)
    with pytest.warns(UserWarning, match=REPLACES):
        dcp_rs.async_save(STATE, ckpt, no_dist=True).result()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "look",
    [
        lambda path: dcp_rs.load({"w": torch.zeros(3)}, path, no_dist=True),
        lambda path: load_rs({"w": torch.zeros(3)}, path),
        lambda path: dcp_rs.open(path)["w"],
        lambda path: dcp_rs.load({"w": torch.zeros(3)}, f"file://{path}", no_dist=True),
    ],
)
def test_loaded_checkpoint_is_replaced_silently(ckpt, look):
    save_elsewhere(ckpt)
    look(ckpt)
    save_rs(STATE, ckpt)


@pytest.mark.usefixtures("silent")
def test_other_paths_of_one_folder_are_known(ckpt, monkeypatch):
    save_elsewhere(ckpt)
    (ckpt.parent / "link").symlink_to(ckpt)
    load_rs({"w": torch.zeros(3)}, ckpt.parent / "link")
    monkeypatch.chdir(ckpt.parent)
    dcp_rs.save(STATE, ckpt.name, no_dist=True)


@pytest.mark.usefixtures("silent")
def test_force_of_a_manager_says_so_already(ckpt):
    save_elsewhere(ckpt, save_step_1)
    with dcp_rs.CheckpointManager(ckpt) as manager:
        manager.save(1, STATE, force=True)


def save_step_1(state, root):
    with dcp_rs.CheckpointManager(root) as manager:
        manager.save(1, state)


def test_ranks_hear_of_it_once(ckpt):
    save_elsewhere(ckpt)
    assert sorted(run_ranks(2, count_warnings, str(ckpt))) == [0, 1]


def count_warnings(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp_rs.save(dict(STATE), path)
    return sum(re.match(REPLACES, str(each.message)) is not None for each in caught)


def test_on_a_store():
    with object_server() as server:
        options = {"storage_options": server.options()}
        url = server.url("ckpt-of-this-test")  # a process knows the URLs that it saved
        dcp_rs.save(STATE, server.url("elsewhere"), no_dist=True, **options)
        for key in server.keys("elsewhere/"):
            server.put(key.replace("elsewhere", "ckpt-of-this-test"), server.objects[key].data)
        with pytest.warns(UserWarning, match=f"{REPLACES} at {url}"):
            dcp_rs.save(STATE, url, no_dist=True, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=REPLACES)
            dcp_rs.save(STATE, url, no_dist=True, **options)
