"""What the tests share: rank processes, state dicts, and their comparison."""

from support.oracle import assert_state_equal, same_bits, state_differences
from support.places import files_in
from support.ranks import (
    Outcome,
    RankDiedError,
    RankPool,
    RanksFailedError,
    RankTimeoutError,
    UnpicklableError,
    rank_outcomes,
    run_ranks,
)
from support.states import (
    ALL_DTYPES,
    blank,
    dtypes_state,
    nested_state,
    random_tensor,
    shapes_state,
    strange_names_state,
)

__all__ = [
    "ALL_DTYPES",
    "Outcome",
    "RankDiedError",
    "RankPool",
    "RankTimeoutError",
    "RanksFailedError",
    "UnpicklableError",
    "assert_state_equal",
    "blank",
    "dtypes_state",
    "files_in",
    "nested_state",
    "random_tensor",
    "rank_outcomes",
    "run_ranks",
    "same_bits",
    "shapes_state",
    "state_differences",
    "strange_names_state",
]
