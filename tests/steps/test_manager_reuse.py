"""Steps that take over from the step before what did not change."""

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.engine.reuse import Parent
from support import run_ranks

FROZEN = 100_000


def state_of(step):
    return {
        "frozen": torch.arange(FROZEN),
        "adapter": torch.full((10,), float(step)),
        "at": {"step": step},
    }


def loaded(manager, **options):
    state = {
        "frozen": torch.zeros(FROZEN, dtype=torch.int64),
        "adapter": torch.zeros(10),
        "at": {"step": -1},
    }
    step = manager.load(state, **options)
    if step is not None:
        want = state_of(step)
        assert torch.equal(state["frozen"], want["frozen"])
        assert torch.equal(state["adapter"], want["adapter"])
        assert state["at"] == want["at"]
    return step


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("background", [False, True])
def test_each_step_is_whole_when_the_others_are_gone(run, background):
    with CheckpointManager(run, keep_last=1, reuse=True) as manager:
        for step in range(1, 5):
            if background:
                manager.async_save(step, state_of(step))
            else:
                manager.save(step, state_of(step))
    with CheckpointManager(run, reuse=True) as manager:
        assert [step.number for step in manager.steps()] == [4]
        assert loaded(manager, verify=True) == 4
        (step,) = manager.steps()
        assert step.reused >= 8 * FROZEN
        assert step.written < 20_000


def test_without_reuse_nothing_is_shared(run):
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert [(step.reused, step.linked) for step in manager.steps()] == [(0, 0)] * 2


@pytest.mark.parametrize("globs", [list, iter])
def test_frozen_tensors_are_compared_once_in_each_run(run, monkeypatch, globs):
    """What another run froze may be something else: a new base model, say."""
    wanted = []
    find = Parent.find_reuse

    def finding(self, writes, *arguments, **options):
        reuse = find(self, writes, *arguments, **options)
        wanted.append(sum(reuse.wanted()) - sum(reuse.probed()))
        return reuse

    monkeypatch.setattr(Parent, "find_reuse", finding)
    for first in (1, 4):
        with CheckpointManager(run, reuse=globs(["frozen"])) as manager:
            loaded(manager)
            for step in range(first, first + 3):
                manager.save(step, state_of(step))
    rest = 2  # the adapter, and the step
    assert wanted == [0, rest, rest, rest + 1, rest, rest]


def test_rollback_over_frozen_values_is_written(run):
    """Frozen at 2 and 3; then the run goes back to 1, of before it was frozen."""
    before = state_of(1) | {"frozen": torch.ones(FROZEN, dtype=torch.int64)}
    with CheckpointManager(run, reuse="frozen") as manager:
        manager.save(1, before)
        for step in (2, 3):
            manager.save(step, state_of(step))
        state = state_of(3)
        assert manager.load(state, step=1) == 1
        manager.save(4, state)
    with dcp_rs.open(manager.path(4)) as checkpoint:
        assert torch.equal(checkpoint["frozen"], before["frozen"])


@pytest.mark.parametrize("kept_as", ["it is", "transposed", "half"])
def test_tensors_frozen_only_during_saves_are_written(run, kept_as):
    """A discriminator in a loop that switches its gradients off, an average of weights: trained between saves all the same."""
    module = torch.nn.Linear(1000, 1000, bias=False)  # more than the block that is compared
    module.requires_grad_(False)
    if kept_as == "transposed":
        module.weight = torch.nn.Parameter(torch.randn(1000, 1000).t(), requires_grad=False)
    dtype = torch.float16 if kept_as == "half" else None
    with CheckpointManager(run, reuse="w") as manager:
        for step in range(1, 5):
            if step in (2, 4):  # not at 3, which takes over
                module.weight.add_(1)
            manager.save(step, {"w": module.weight}, dtype=dtype)
            with dcp_rs.open(manager.path(step)) as checkpoint:
                want = module.weight.half() if kept_as == "half" else module.weight
                assert torch.equal(checkpoint["w"], want), step
        reused = [step.reused > 0 for step in manager.steps()]
    assert reused == [False, False, True, False]


def test_another_base_model_in_a_resumed_run_is_written(run):
    with CheckpointManager(run, reuse="frozen") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    other = state_of(3) | {"frozen": torch.ones(FROZEN, dtype=torch.int64)}
    with CheckpointManager(run, reuse="frozen") as manager:
        manager.save(3, other)
    with dcp_rs.open(manager.path(3)) as checkpoint:
        assert torch.equal(checkpoint["frozen"], other["frozen"])


def test_max_bytes_counts_what_is_shared_once(run):
    with CheckpointManager(run, reuse=True, max_bytes=8 * FROZEN + 100_000) as manager:
        for step in range(1, 8):
            manager.save(step, state_of(step))
        assert len(manager.steps()) == 7


def test_a_damaged_parent_is_passed_over_and_a_flipped_byte_found(run):
    with CheckpointManager(run, reuse=True, verify_reuse=True) as manager:
        manager.save(1, state_of(1))
        file = next(manager.path(1).glob("g*"))
        with file.open("r+b") as data:
            data.seek(8 * FROZEN)
            data.write(b"\xff")
        with pytest.warns(UserWarning, match="frozen"):
            manager.save(2, state_of(2))
        assert loaded(manager, verify=True) == 2


def test_damaged_step_is_no_parent(run):
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        (file,) = [path for path in manager.path(2).iterdir() if path.suffix == ".safetensors"]
        data = bytearray(file.read_bytes())
        data[-FROZEN] ^= 1
        file.write_bytes(data)
    with CheckpointManager(run, reuse=True) as manager:
        with pytest.warns(UserWarning, match="not resumed from"):
            assert loaded(manager, verify=True) == 1
        manager.save(3, state_of(3))
        assert loaded(manager, step=3, verify=True) == 3


def test_reuse_is_checked_at_once(run):
    with pytest.raises(TypeError, match="globs over names"):
        CheckpointManager(run, reuse=3)


def train(root, steps):
    rank = dist.get_rank()
    with CheckpointManager(root, keep_last=2, reuse=True) as manager:
        for step in steps:
            manager.async_save(step, state_of(step) | {f"of.{rank}": torch.full((5000,), rank)})
    with dcp_rs.open(manager.path(steps[-1]), verify=True) as checkpoint:
        assert torch.equal(checkpoint[f"of.{rank}"], torch.full((5000,), rank))
        assert torch.equal(checkpoint["adapter"], state_of(steps[-1])["adapter"])


def test_ranks_agree_on_the_step_that_is_reused(run):
    run_ranks(2, train, str(run), [1, 2, 3])
    with CheckpointManager(run) as manager:
        assert [step.reused >= 8 * FROZEN for step in manager.steps()] == [True, True]
