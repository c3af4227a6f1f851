"""Saves and steps that are told apart by a number: they are made, loaded, recognized."""

import torch

import dcp_rs
from crash.states import rank_state


def save(path, number):
    dcp_rs.save(rank_state(number, 0), path, no_dist=True, fsync=False)


def template():
    state = rank_state(0, 0)
    return {
        key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else dict.fromkeys(v)
        for key, v in state.items()
    }


def check_loaded(got):
    """Returns which save it is, all of it."""
    number = int(got["common"][0])
    for key, value in rank_state(number, 0).items():
        assert (
            torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        ), key
    return number


def state_of(step):
    """The state of a run at a step, for managers."""
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


def bad_state(step):
    """One whose save fails."""
    return state_of(step) | {"bad": torch.empty(1, device="meta")}


def killed(manager, step):
    """Leave what a save leaves that is killed before its commit."""
    store, save_id = manager._store, f"{step:032x}"
    store.begin(step, save_id, {})
    path = store.folder(step)
    dcp_rs.save(state_of(step), path, save_id=save_id, no_dist=True, **store.access)
    store.remove_files([path / "index.dcprs"])


def names_in(run):
    """The names in the folder of a run, but for the note of whose run it is, and the lock."""
    return sorted(path.name for path in run.iterdir() if not path.name.startswith(".dcprs"))


def numbers(manager):
    return [step.number for step in manager.steps()]


def loaded(manager, step=None, **options):
    state = {"w": torch.zeros(1000), "at": {"step": -1}}
    found = manager.load(state, step, **options)
    if found is not None:
        assert state["w"].eq(float(found)).all()
        assert state["at"] == {"step": found}
    return found
