"""What a manager of checkpoints has, and what loads of it."""

import torch


def numbers(manager):
    return [step.number for step in manager.steps()]


def loaded(manager, step=None, **options):
    state = {"w": torch.zeros(1000), "at": {"step": -1}}
    found = manager.load(state, step, **options)
    if found is not None:
        assert state["w"].eq(float(found)).all()
        assert state["at"] == {"step": found}
    return found
