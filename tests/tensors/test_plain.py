"""Which tensors are plain, so that bytes in host memory are all there is to them: told by torch in one call (DLPack's C exchange API), and attribute by attribute."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

import dcp_rs
from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.tensors.dtypes import NAMES
from support.states import can_copy

API = "__dlpack_c_exchange_api__"


class Own(torch.Tensor):
    """A class of a user's."""


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def marked() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.global_shape = (4,)
    return tensor


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.arange(6.0).reshape(2, 3),
    "without dimensions": lambda: torch.tensor(7),
    "without elements": lambda: torch.ones(0, 3),
    "from the middle": lambda: torch.arange(10)[3:7],
    "of one row, which lies apart": lambda: torch.arange(12.0).as_strided((1, 3), (7, 1), 2),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "of bytes": lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
}
STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "every second": lambda: torch.arange(10.0)[::2],
    "one element many times": lambda: torch.ones(1).expand(4),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag[:1],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "on meta": lambda: torch.ones(3, device="meta"),
    "freed": freed,
    "of a class of its own": lambda: torch.ones(3).as_subclass(Own),
    "marked": marked,
    "of bits": lambda: torch.empty(3, dtype=torch.bits8),
}


@pytest.fixture(params=["in one call", "attribute by attribute"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How torch tells."""
    if request.param == "attribute by attribute":
        monkeypatch.delattr(torch.Tensor, API, raising=False)
    elif not hasattr(torch.Tensor, API):
        pytest.skip("this torch has no exchange API")


def left_out(tensors: list[torch.Tensor]) -> list[int]:
    plan = _core.SavePlan()
    names = [str(i) for i in range(len(tensors))]
    return plan.add_plain(names, None, tensors, PLAIN_TYPES, NAMES)


@pytest.mark.usefixtures("told")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("tensors", "is_plain"), [(PLAIN, True), (STRIDED, False), (OTHERS, False)]
)
def test_plain_tensors_are_saved_in_place(
    tensors: dict[str, Callable[[], torch.Tensor]], is_plain: bool
) -> None:
    made = [make() for make in tensors.values()]
    expected = [] if is_plain else list(tensors)
    assert [list(tensors)[i] for i in left_out(made)] == expected


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "kind", [*PLAIN, *(kind for kind in STRIDED if kind != "one element many times")]
)
def test_plain_tensors_are_loaded_in_place(kind: str, tmp_path) -> None:
    tensor = (PLAIN | STRIDED)[kind]()
    values = torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype)
    dcp_rs.save({"x": values}, tmp_path, no_dist=True)
    dcp_rs.load({"x": tensor.detach()}, tmp_path, no_dist=True)
    assert torch.equal(tensor.detach().to(torch.complex128), values.to(torch.complex128))


#: More than are looked at before another thread goes on with them.
MANY = 3000


def of_bytes(i: int) -> torch.Tensor:
    """The i-th of many: of all dtypes in turn, and of several sizes."""
    dtype = list(NAMES)[i % len(NAMES)]
    numbers = torch.arange(i, i + dtype.itemsize * 4 * (1 + i % 3)) % (
        2 if dtype == torch.bool else 127
    )
    return numbers.to(torch.uint8).view(dtype).reshape(1 + i % 3, 4)


@pytest.mark.usefixtures("told")
def test_many_of_all_dtypes(tmp_path) -> None:
    stored = {f"t{i * 7 % MANY:04}": of_bytes(i) for i in range(MANY)}
    dcp_rs.save(stored, tmp_path, no_dist=True)

    def target(i: int, values: torch.Tensor) -> torch.Tensor:
        """Of some the elements do not lie side by side."""
        empty = torch.empty(
            values.shape[::-1], dtype=torch.uint8 if values.itemsize == 1 else values.dtype
        )
        is_apart = i % 5 == 0 and can_copy(values.dtype)  # what compares it copies it
        return empty.view(values.dtype).T if is_apart else torch.empty_like(values)

    names = sorted(stored, key=lambda name: name[::-1])
    loaded = {name: target(i, stored[name]) for i, name in enumerate(names)}
    dcp_rs.load(loaded, tmp_path, no_dist=True)
    for name, tensor in loaded.items():
        assert bytes(tensor.contiguous().view(torch.uint8).numpy()) == bytes(
            stored[name].view(torch.uint8).numpy()
        )


SMALL_TYPES = [
    (name, whole)
    for name, whole in [("uint4", torch.uint8), ("int4", torch.int8)]
    if hasattr(torch, name)
]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("name", "whole"), SMALL_TYPES)
@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("is_first", [False, True])
def test_integers_of_a_few_bits_are_not_bytes(
    name: str, whole: torch.dtype, count: int, is_first: bool, tmp_path
) -> None:
    """DLPack calls them the same."""

    def beside(small: torch.Tensor) -> dict[str, torch.Tensor]:
        others = {f"{i}": torch.ones(4, dtype=whole) for i in range(count)}
        return {"small": small} | others if is_first else others | {"small": small}

    small = torch.ones(4, dtype=whole).view(getattr(torch, name))
    with pytest.raises(dcp_rs.errors.UnsupportedError, match=f"small.*torch.{name}"):
        dcp_rs.save(beside(small), tmp_path / "refused", no_dist=True)
    dcp_rs.save(beside(torch.zeros(4, dtype=whole)), tmp_path / "saved", no_dist=True)
    with pytest.raises(dcp_rs.errors.PlanError, match=f"small.*torch.{name}"):
        dcp_rs.load(beside(small), tmp_path / "saved", no_dist=True)
    assert torch.equal(small.view(whole), torch.ones(4, dtype=whole))


@pytest.mark.usefixtures("told")
def test_unknown_tensor_leaves_the_others_plain() -> None:
    of_bits = torch.empty(3, dtype=torch.bits8)
    assert left_out(
        [torch.ones(3), of_bits, torch.ones(3), torch.ones(3, device="meta"), torch.ones(3)]
    ) == [1, 3]


class Looked(TorchFunctionMode):
    """Does something when a tensor is looked at for the so manieth time."""

    def __init__(self, at: int, do: Callable[[], object]) -> None:
        super().__init__()
        self.left = at
        self.do = do

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "is_neg":
            self.left -= 1
            if self.left == 0:
                self.do()
        return func(*args, **(kwargs or {}))


def begun(tensors: list[torch.Tensor], path) -> _core.Save:
    plan = _core.SavePlan()
    assert not plan.add_plain(
        [f"{i:04}" for i in range(len(tensors))], None, tensors, PLAIN_TYPES, NAMES
    )
    options = {"threads": 0, "fsync": True, "io": "auto", "max_inflight_bytes": 1 << 24}
    which = {"save_id": bytes(16), "generation": 1, "token": 1, "rank": 0, "world_size": 1}
    return plan.create(str(path), None, [], **which, **options)


def test_a_save_is_not_locked_while_tensors_are_looked_at(tmp_path) -> None:
    """Looking may run Python, which may come back to the save."""
    tensors = [torch.full((1024,), float(i)) for i in range(MANY)]
    save = begun(tensors, tmp_path)
    seen = []
    with Looked(MANY - 1, lambda: seen.append(save.reused())):
        save.write_plain(tensors, PLAIN_TYPES, NAMES)
    assert seen == [[False] * MANY]
    assert save.finish()


def test_first_error_of_a_write_is_raised(tmp_path) -> None:
    tensors = [torch.full((1024,), float(i)) for i in range(MANY)]
    save = begun(tensors, tmp_path)
    save.write_plain(tensors, PLAIN_TYPES, NAMES)

    def fail() -> None:
        time.sleep(0.5)  # the first were refused by now
        msg = "later"
        raise ValueError(msg)

    with (
        Looked(MANY // 2, fail),
        pytest.raises(dcp_rs.errors.PlanError, match=r"0000.*written before"),
    ):
        save.write_plain(tensors, PLAIN_TYPES, NAMES)


def test_a_signal_comes_before_what_made_the_write_fail(tmp_path) -> None:
    tensors = [torch.full((1024,), float(i)) for i in range(MANY)]
    save = begun(tensors, tmp_path)
    save.write_plain(tensors, PLAIN_TYPES, NAMES)

    def interrupt() -> None:
        time.sleep(0.5)
        raise KeyboardInterrupt

    with Looked(MANY // 2, interrupt), pytest.raises(KeyboardInterrupt):
        save.write_plain(tensors, PLAIN_TYPES, NAMES)


def test_one_of_many_is_replaced_while_others_are_written(tmp_path) -> None:
    tensors = [torch.full((1024,), float(i)) for i in range(MANY)]
    save = begun(tensors, tmp_path)
    tensors[-1] = torch.ones(7)
    with pytest.raises(dcp_rs.errors.PlanError, match="changed its shape or place"):
        save.write_plain(tensors, PLAIN_TYPES, NAMES)
    with pytest.raises(dcp_rs.errors.PlanError):
        save.finish()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.usefixtures("told")
def test_a_table_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, API, "no capsule", raising=False)
    assert left_out([torch.ones(3), torch.ones(4).to_sparse()]) == [1]


def test_a_view_of_a_freed_storage_is_no_memory(tmp_path):
    """What is left of its address is the offset."""
    view = torch.ones(8)[4:]
    view.untyped_storage().resize_(0)
    assert view.data_ptr() == 16
    with pytest.raises(dcp_rs.errors.DcpRsError, match="w"):
        dcp_rs.save({"w": view}, tmp_path / "new", no_dist=True)
    dcp_rs.save({"w": torch.ones(4)}, tmp_path / "ckpt", no_dist=True)
    with pytest.raises(dcp_rs.errors.DcpRsError, match="w"):
        dcp_rs.load({"w": view}, tmp_path / "ckpt", no_dist=True)


def test_one_attribute_of_a_shard_makes_none(tmp_path):
    """Torch asks for all four."""
    dcp_rs.save({"w": marked()}, tmp_path, no_dist=True)
    target = marked().zero_()
    dcp_rs.load({"w": target}, tmp_path, no_dist=True)
    assert target.tolist() == [1, 1]
