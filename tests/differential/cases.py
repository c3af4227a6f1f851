"""What is drawn: state dicts, where they lie on ranks, who plans, and what happens in which order. Plain data, which ranks turn into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from support.states import ALL_DTYPES, can_copy
from support.strategies import meshes

#: Older torch cannot copy its youngest dtypes, and stock copies.
DTYPES = [dtype for dtype in ALL_DTYPES if can_copy(dtype)]
#: How a tensor lies in memory.
FORMS = (
    "plain",
    "parameter",
    "transposed",
    "steps",
    "offset",
    "expanded",
    "conj",
    "neg",
    "tied",
    "tied view",
)
#: A placement for each dimension of a mesh: replicated, sharded along a dimension, or pending a
#: sum.
PLACES = ("R", "S0", "S1", "S2", "P")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a state dict.

    Attributes:
        shape: of the whole.
        dtype: its dtype.
        form: one of ``FORMS``.
        kind: ``"plain"`` (every rank has all of it), ``"dtensor"``, ``"sharded"`` (a
            ShardedTensor), or ``"own"`` (of one rank alone).
        number: what its values are made of; two tensors of one number differ by nothing else.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str
    kind: str
    number: int


@dataclass(frozen=True)
class Holder:
    """A ``Stateful`` with this state."""

    state: Any


@dataclass(frozen=True)
class RankGroup:
    """A world: how many ranks, as which mesh, and where each DTensor lies on it (by its number, a code for each dimension of the mesh)."""

    mesh: tuple[int, ...]
    places: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        size = 1
        for extent in self.mesh:
            size *= extent
        return size


@dataclass(frozen=True)
class Save:
    """A save, or several that follow each other in one process group.

    Attributes:
        ranks: who saves.
        through: ``"dcp"`` (torch's function, our writer) or ``"dcp_rs"``, which takes no planner.
        hook: name of a body of ``bodies.SAVES``, and how it gets into the planner; None: the
            planner as it is.
        planner: ``"ours"`` or ``"torch"``.
        options: of the planner.
        times: how often; the values change from one to the next.
    """

    ranks: RankGroup
    through: str
    planner: str
    hook: tuple[str, str] | None
    options: dict[str, Any]
    times: int


@dataclass(frozen=True)
class Load:
    """A load of the last save.

    Attributes:
        ranks, through, hook, planner: as of a save.
        options: of the planner.
        reader: options of our reader.
        forms: of the destinations, by number.
        changes: names at the top that are left out (``-name``), and whether one more is asked for
            (``+``).
        cast: what floating-point tensors of the state dict are, in place of what was saved.
    """

    ranks: RankGroup
    through: str
    planner: str
    hook: tuple[str, str] | None
    options: dict[str, Any]
    reader: dict[str, Any]
    forms: dict[int, str]
    changes: tuple[str, ...]
    cast: torch.dtype | None


@dataclass(frozen=True)
class Case:
    """A state dict, and what happens to it."""

    state: dict[Any, Any]
    steps: list[Save | Load] = field(default_factory=list)


# --- drawing

_keys = st.sampled_from(["a", "b", "w", "x.y", "", "0", "état", "deep", "k" * 40]) | st.integers(
    0, 3
)
_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.binary(max_size=4),
    st.tuples(st.integers(0, 9), st.text(max_size=2)),
    st.just(torch.float16),
    st.just(torch.Size([2, 3])),
    st.lists(st.integers(0, 3), max_size=2),
    st.just({}),
    st.just([]),
)


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    forms = [
        form
        for form in FORMS
        if (form not in ("conj", "neg") or dtype in (torch.complex64, torch.complex128))
        and (form != "parameter" or dtype.is_floating_point)
    ]
    return Tensor(
        tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
        dtype,
        draw(st.sampled_from(forms)),
        draw(
            st.sampled_from(["plain", "plain", "dtensor", "dtensor", "dtensor", "sharded", "own"])
        ),
        draw(st.integers(0, 999)),
    )


def _trees() -> st.SearchStrategy[dict[Any, Any]]:
    leaves = _tensors() | _tensors() | _values
    inner = st.recursive(
        leaves,
        lambda children: (
            st.lists(children, max_size=3) | st.dictionaries(_keys, children, max_size=3)
        ),
        max_leaves=5,
    )
    top = inner | st.builds(Holder, st.dictionaries(_keys, inner, max_size=2))
    return st.dictionaries(
        st.sampled_from(["a", "b", "model", "x.y", "step"]), top, min_size=1, max_size=4
    )


_place = st.sampled_from(PLACES[:4] * 4 + PLACES)
_ranks = st.sampled_from([1, 2, 2, 3, 4]).flatmap(
    lambda size: st.builds(
        RankGroup,
        meshes(size),
        st.lists(st.tuples(_place, _place), min_size=1, max_size=4).map(tuple),
    )
)


def _hooks(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, str] | None]:
    ways = ("in_a_subclass", "on_the_object", "in_a_forwarding_wrapper", "in_a_delegating_wrapper")
    return st.none() | st.none() | st.tuples(st.sampled_from(names), st.sampled_from(ways))


def _options(**choices: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in choices.items()}
    )


def saves(hooks: tuple[str, ...]) -> st.SearchStrategy[Save]:
    """A save by planners with any of these bodies."""
    options = _options(
        dedup_save_to_lowest_rank=[True],
        enable_plan_caching=[True],
        flatten_sharded_tensors=[False],
    )
    # As it was given: torch's flattening of ShardedTensors makes keys text and drops what is empty,
    # by itself too (docs/differences.md).
    options |= st.just({"flatten_state_dict": False, "flatten_sharded_tensors": False})
    through = st.sampled_from(["dcp", "dcp_rs"])
    planner = st.sampled_from(["ours", "ours", "torch"])
    return st.builds(
        Save, _ranks, through, planner, _hooks(hooks), options, st.sampled_from([1, 1, 2, 3])
    )


def loads(hooks: tuple[str, ...]) -> st.SearchStrategy[Load]:
    """A load by planners with any of these bodies."""
    return st.builds(
        Load,
        _ranks,
        st.sampled_from(["dcp", "dcp_rs"]),
        st.sampled_from(["ours", "ours", "torch"]),
        _hooks(hooks),
        _options(allow_partial_load=[True]),
        _options(
            verify=[True],
            replicas=["all", "node"],
            io=["mmap", "direct", "buffered"],
            max_inflight_bytes=[1, 4096],
        ),
        st.dictionaries(
            st.integers(0, 3),
            st.sampled_from(["plain", "parameter", "transposed", "steps", "offset"]),
        ),
        st.lists(st.sampled_from(["-a", "-model", "+"]), max_size=1).map(tuple),
        st.none() | st.none() | st.sampled_from([torch.float64, torch.bfloat16]),
    )


def cases(save_hooks: tuple[str, ...], load_hooks: tuple[str, ...]) -> st.SearchStrategy[Case]:
    """State dicts with a history: saved, loaded elsewhere, saved again."""
    history = st.tuples(
        st.lists(saves(save_hooks), min_size=1, max_size=2),
        st.lists(loads(load_hooks), min_size=1, max_size=2),
    ).map(lambda both: [*both[0], *both[1]])
    return st.builds(Case, _trees(), history)
