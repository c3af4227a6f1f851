"""Steps of ranks: whoever fails, all raise, and the group is of use afterwards. A rank that is killed is missed by all."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import DcpRsError, PlanError, RankLostError, UnsupportedError
from support import RankDiedError, rank_outcomes, run_ranks


class TwoArgumentsError(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(error):
    raise error


def fails(step, error=DcpRsError):
    """The error that a step ends with."""
    with pytest.raises(error) as raised:
        step()
    return raised.value


def on(rank, error):
    """Work that fails on one rank, and gives the rank's number on the others."""
    return lambda: fail(error) if dist.get_rank() == rank else dist.get_rank()


def steps(ranks):
    """Each kind of step, of work."""
    return {
        "together": ranks.run,
        "all": ranks.all_gather,
        "divided": lambda work: ranks.reduce_scatter(
            work, lambda values: [value * 10 for value in values]
        ),
        "joined": lambda work: ranks.all_reduce(work, sum),
    }


def do_well():
    ranks, me = RankGroup(), dist.get_rank()
    given = {name: step(lambda: me) for name, step in steps(ranks).items()}
    assert given == {"together": me, "all": [0, 1, 2], "divided": me * 10, "joined": 3}
    assert ranks.broadcast(lambda: f"of rank {me}") == "of rank 0"
    assert RankGroup(coordinator=2).broadcast(lambda: f"of rank {me}") == "of rank 2"
    assert ranks.failures == {}


def test_steps_that_go_well():
    run_ranks(3, do_well)


def fail_on_one():
    me = dist.get_rank()
    for culprit in (0, 2):
        for name, step in steps(RankGroup()).items():
            error = fails(lambda: step(on(culprit, PlanError("no", tensor="w"))), PlanError)  # noqa: B023
            assert error.tensor == "w", name
            assert error.__notes__ == [f"raised on rank {culprit}"], name
            # An error of the user's is itself where it was raised, and elsewhere too, with where
            # that was.
            error = fails(lambda: step(on(culprit, KeyError("mine"))), KeyError)  # noqa: B023
            assert error.__notes__[-1] == f"raised on rank {culprit}", name
            assert len(error.__notes__) == (1 if me == culprit else 2), name
            # What does not travel arrives as text.
            kind = TwoArgumentsError if me == culprit else DcpRsError
            error = fails(lambda: step(on(culprit, TwoArgumentsError("one", "two"))), kind)  # noqa: B023
            assert "one and two" in str(error), name
            assert me == culprit or "TwoArgumentsError" in str(error)
            kind = KeyboardInterrupt if me == culprit else DcpRsError
            fails(lambda: step(on(culprit, KeyboardInterrupt())), kind)  # noqa: B023
    assert type(fails(lambda: RankGroup().broadcast(lambda: fail(PlanError("first"))))) is PlanError
    do_well()


def test_an_error_of_one_rank_is_that_of_all():
    run_ranks(3, fail_on_one)


def fail_on_two():
    me = dist.get_rank()
    ranks = RankGroup()
    error = fails(lambda: ranks.run(lambda: fail(PlanError(f"of {me}")) if me else None))
    first = me or 1
    assert str(error) == f"of {first}"
    assert error.__notes__ == [f"raised on ranks 1, 2; this is rank {first}'s"]
    assert {rank: str(error) for rank, error in ranks.failures.items()} == {1: "of 1", 2: "of 2"}
    do_well()


def test_ranks_that_fail_together():
    run_ranks(3, fail_on_two)


def fail_elsewhere():
    """What goes wrong where the coordinator alone is at work, and between steps."""
    me, ranks = dist.get_rank(), RankGroup()
    assert fails(
        lambda: ranks.all_reduce(lambda: me, lambda _: fail(PlanError("join")))
    ).__notes__ == ["raised on rank 0"]
    assert (
        str(fails(lambda: ranks.reduce_scatter(lambda: me, lambda _: fail(PlanError("divide")))))
        == "divide"
    )
    unfit = (lambda: None) if me == 1 else None  # it does not pickle
    assert fails(lambda: ranks.all_gather(lambda: unfit), UnsupportedError).__notes__ == [
        "raised on rank 1"
    ]
    assert fails(lambda: ranks.all_reduce(lambda: unfit, len), UnsupportedError).__notes__ == [
        "raised on rank 1"
    ]

    def outer():
        """Rank 1 does not come to the inner steps, and the others have not heard of it."""
        if me == 1:
            raise PlanError("early")
        return ranks.all_gather(lambda: ranks.run(lambda: me))

    error = fails(lambda: ranks.run(outer), PlanError)
    assert error.__notes__ == ["raised on rank 1"]
    do_well()


def test_an_error_meets_the_others_wherever_they_are():
    run_ranks(3, fail_elsewhere)


def some_ranks():
    me = dist.get_rank()
    group = dist.new_group([0, 2])
    alone = RankGroup(no_dist=True)
    assert (alone.rank, alone.size, alone.all_gather(lambda: me)) == (0, 1, [me])
    fails(lambda: alone.run(lambda: fail(PlanError("mine"))), PlanError)
    if me == 1:
        with pytest.raises(ValueError, match="process group"):
            RankGroup(group)
        return
    ranks = RankGroup(group)
    assert (ranks.rank, ranks.size, ranks.all_gather(lambda: me)) == (me // 2, 2, [0, 2])
    assert fails(lambda: ranks.run(on(2, PlanError("no")))).__notes__ == ["raised on rank 2"]
    assert list(ranks.failures) == [1]


def test_ranks_outside_of_the_group_are_left_alone():
    run_ranks(3, some_ranks)


def test_without_a_process_group_it_is_this_process():
    ranks = RankGroup()
    assert ranks.is_alone
    assert ranks.is_coordinator
    assert [step(lambda: 5) for step in steps(ranks).values()] == [5, [5], 50, 5]
    error = fails(lambda: ranks.all_reduce(lambda: fail(KeyError("k")), sum), KeyError)
    assert ranks.failures == {0: error}
    assert not hasattr(error, "__notes__")


def lose_one(step, culprit):
    """The others stay, and do not end: who is not beside the lost one hears of it from those who are."""
    steps(RankGroup())[step](
        lambda: os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() == culprit else 1
    )


@pytest.mark.parametrize(("step", "culprit"), [("together", 3), ("divided", 3), ("joined", 0)])
def test_a_rank_that_is_killed_is_missed_by_all(step, culprit):
    outcomes = rank_outcomes(4, lose_one, step, culprit, timeout=60)
    assert isinstance(outcomes.pop(culprit).error, RankDiedError)
    for outcome in outcomes:
        assert type(outcome.error) is RankLostError, outcome
        assert "a rank is lost, and the process group does not say which" in str(outcome.error)


def wait_for_one_that_does_not_come():
    """All connections are there, and rank 1 is not at the step."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    ranks = RankGroup(group)
    ranks.run(lambda: None)
    if dist.get_rank() == 1:
        time.sleep(4)
    ranks.run(lambda: None)


def test_nobody_is_blamed_for_a_rank_that_is_stopped():
    """Every survivor was told that all other ranks were gone."""
    for outcome in rank_outcomes(3, wait_for_one_that_does_not_come, timeout=60):
        assert type(outcome.error) is RankLostError, outcome
        assert "does not say which" in str(outcome.error)


def be_interrupted_in_a_collective():
    ranks = RankGroup()
    ranks.run(lambda: None)
    if dist.get_rank() == 1:
        with ranks.talking():
            raise KeyboardInterrupt
    ranks.run(lambda: None)


def test_ctrl_c_in_a_collective_keeps_no_other_rank_waiting():
    zero, one, two = rank_outcomes(3, be_interrupted_in_a_collective, timeout=60)
    assert type(one.error) is KeyboardInterrupt, one
    assert [type(outcome.error) for outcome in (zero, two)] == [RankLostError, RankLostError]


def lose_one_while_sending(culprit):
    """It is gone in the midst of a message to each of the others."""
    ranks, me = RankGroup(), dist.get_rank()
    if me == culprit:
        ranks.run(lambda: None)
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.run(lambda: None)
    message = torch.zeros(1 << 20)
    with ranks.talking():
        dist.recv(message, culprit)


def test_a_rank_that_is_killed_is_missed_by_those_who_wait_for_a_message():
    *outcomes, last = rank_outcomes(3, lose_one_while_sending, 2, timeout=60)
    assert isinstance(last.error, RankDiedError)
    assert all(type(outcome.error) is RankLostError for outcome in outcomes), outcomes
