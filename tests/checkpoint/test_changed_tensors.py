"""Tensors that a pickle changes after it made them: read as torch reads them, or refused.

`open` gave zeros where `torch.load` gave sixes, and `verify` found nothing: the state of a tensor
was ignored, whether it was set by an opcode or passed to a function.
"""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs.errors import DcpRsError, UnsupportedError
from support import same_bits
from support.torch_files import archive, flat, text

ZEROS, SIXES = torch.zeros(4), torch.full((4,), 6.0)
RECORDS = [(f"data/{key}", t.numpy().tobytes()) for key, t in enumerate([ZEROS, SIXES])]
HOOKS = b"ccollections\nOrderedDict\n)R"


def storage(key, kind="FloatStorage", count=4):
    return (
        b"("
        + text("storage")
        + b"ctorch\n%s\n" % kind.encode()
        + text(key)
        + text("cpu")
        + (b"K%ctQ" % count)
    )


def place(key, kind="FloatStorage"):
    """Storage, offset, sizes and strides."""
    return storage(key, kind) + b"K\x00K\x04\x85K\x01\x85"


def tensor(key, more=b"", kind="FloatStorage"):
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + place(key, kind) + b"\x89" + HOOKS + more + b"tR"
    )


def pair(name, value):
    return text(name) + value + b"s"


OTHER = b"}" + pair("data", tensor("1"))
PARAMETER = b"ctorch.nn.parameter\nParameter\n"
WITH_STATE = b"ctorch._utils\n_rebuild_parameter_with_state\n(" + tensor("0") + b"\x88" + HOOKS
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n%s("
ARGUMENTS = place("0") + b"\x89" + HOOKS + b"t"
OF_TENSOR, OF_PARAMETER = (
    FROM_TYPE % kind + ARGUMENTS for kind in (b"ctorch\nTensor\n", PARAMETER)
)

#: Pickles of one value for which torch reads sixes.
CHANGED = {
    "a tensor, set": tensor("0") + b"(" + place("1") + b"tb",
    "a parameter, set": PARAMETER + b"(" + tensor("0") + b"\x89t\x81(" + place("1") + b"tb",
    "a parameter with other data": PARAMETER
    + tensor("0")
    + b"\x85\x81("
    + tensor("1")
    + b"NN\x88Ntb",
    "a function's parameter, set": b"ctorch._utils\n_rebuild_parameter\n("
    + tensor("0")
    + b"\x89"
    + HOOKS
    + b"tR("
    + place("1")
    + b"tb",
    "a parameter's state": WITH_STATE + OTHER + b"tR",
    "a parameter's slots": WITH_STATE + b"}" + OTHER + b"\x86tR",
    "a tensor's state": OF_TENSOR + OTHER + b"tR",
    "a tensor's slots": OF_TENSOR + b"N" + OTHER + b"\x86tR",
    "a parameter by its type": OF_PARAMETER + OTHER + b"tR",
    "its real part": OF_TENSOR + b"}" + pair("real", tensor("1")) + b"tR",
    "the tensor of a parameter": b"ctorch._utils\n_rebuild_parameter\n("
    + tensor("0")
    + b"("
    + place("1")
    + b"tb\x88"
    + HOOKS
    + b"tR",
}
#: State that changes nothing: the tensor stays where it is.
HARMLESS = {
    "a parameter's note": WITH_STATE + b"}" + pair("note", text("x")) + b"tR",
    "a tensor's note": OF_TENSOR + b"}" + pair("note", b"K\x01") + b"tR",
    "no state": WITH_STATE + b"NtR",
}
#: Whole pickles that torch reads in another way than by their last state.
TRICKS = {
    "flags that change later": b"}"
    + text("w")
    + tensor("0", b"}q\x00")
    + b"sh\x00"
    + pair("neg", b"\x88")
    + b"0",
    "a storage of two types": b"}"
    + pair("i", tensor("1", kind="IntStorage"))
    + pair("w", tensor("1")),
    "a count that changes later": b"}"
    + text("c")
    + b"ccollections\nCounter\n}q\x00\x85Rsh\x00"
    + pair("a", b"K\x01")
    + b"0",
    "a set of a list that changes later": b"}"
    + text("s")
    + b"c__builtin__\nset\n]q\x00\x85Rsh\x00K\x01a0",
    "keys that are equal in Python": b"}K\x01" + text("one") + b"s\x88" + text("true") + b"s",
}


def state_dict(value):
    return b"\x80\x02}" + pair("w", value) + b"."


def load(data):
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("value", CHANGED.values(), ids=CHANGED)
def test_changed_tensor_is_what_torch_reads(value, tmp_path):
    data = archive(state_dict(value), RECORDS)
    assert same_bits(load(data)["w"].detach(), SIXES)
    (tmp_path / "m.pt").write_bytes(data)
    assert same_bits(dcp_rs.open(tmp_path / "m.pt")["w"].detach(), SIXES)


@pytest.mark.parametrize("value", CHANGED.values(), ids=CHANGED)
def test_changed_tensor_in_a_list_is_an_entry(value, tmp_path):
    data = archive(state_dict(b"]" + value + b"a"), RECORDS)
    (tmp_path / "m.pt").write_bytes(data)
    assert same_bits(dcp_rs.open(tmp_path / "m.pt")["w.0"].detach(), SIXES)


@pytest.mark.parametrize("value", HARMLESS.values(), ids=HARMLESS)
def test_attributes_do_not_make_a_tensor_a_value(value, tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(state_dict(value), RECORDS))
    checkpoint = dcp_rs.open(tmp_path / "m.pt")
    assert checkpoint.info("w").shape == (4,)
    assert same_bits(checkpoint["w"].detach(), ZEROS)


@pytest.mark.parametrize("pickle", TRICKS.values(), ids=TRICKS)
def test_file_that_torch_reads_differently_is_refused(pickle, tmp_path):
    data = archive(b"\x80\x02" + pickle + b".", RECORDS)
    (tmp_path / "m.pt").write_bytes(data)
    try:
        checkpoint = dcp_rs.open(tmp_path / "m.pt")
        got = {name: checkpoint[name] for name in checkpoint}
    except DcpRsError:
        return
    want = flat(load(data))
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert same_bits(value, want[name])


@pytest.mark.parametrize("value", (CHANGED | HARMLESS).values(), ids=[*CHANGED, *HARMLESS])
def test_changed_tensor_of_a_stock_checkpoint(value, tmp_path, monkeypatch):
    stored = archive(b"\x80\x02" + value + b".", RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda _, stream: stream.write(stored))
        dcp.save({"w": ZEROS}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    state = {"w": torch.ones(4)}
    dcp.load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    if value in HARMLESS.values():
        assert same_bits(dcp_rs.open(tmp_path / "ckpt")["w"], state["w"])
    else:
        with pytest.raises(UnsupportedError, match="FileSystemReader"):
            dcp_rs.open(tmp_path / "ckpt")


def test_every_attribute_that_changes_a_tensor_is_known(tmp_path):
    # A new release of torch may add one. The values are those that torch lets one set.
    values = {
        None: b"N",
        "tensor": tensor("1"),
        True: b"\x88",
        "dict": b"}",
        "dtype": b"ctorch\nfloat32\n",
    }
    changing = set()
    for name in dir(torch.Tensor):
        for value in values.values():
            data = archive(state_dict(OF_TENSOR + b"}" + pair(name, value) + b"tR"), RECORDS)
            try:
                read = load(data)["w"]
            except Exception:  # noqa: BLE001 - torch refuses it
                continue
            is_descriptor = any(
                hasattr(kind.__dict__.get(name), "__set__") for kind in torch.Tensor.__mro__
            )
            (tmp_path / "m.pt").write_bytes(data)
            if is_descriptor:
                changing.add(name)
                assert dcp_rs.open(tmp_path / "m.pt").info("w").dtype is None, name
            else:
                assert same_bits(dcp_rs.open(tmp_path / "m.pt")["w"], torch.Tensor.detach(read))
    assert {"data", "real", "requires_grad"} <= changing
