"""The conformance suite: the two readers there are pass it, and readers that are wrong do not."""

import pytest
import torch

import dcp_rs
from support import conformance
from support.oracle import raw_bytes
from support.second_reader import SecondReader


def second_reader(path):
    reader = SecondReader.open(path)
    return {name: reader.read(name) for name in reader.tensors}


def this_package(path):
    index = dcp_rs._core.Index.open(str(path), None, False)
    with dcp_rs.open(path, verify=True) as checkpoint:
        entries = {}
        for number, name in enumerate(index.names()):
            tensor = checkpoint[name]
            if checkpoint.info(name).dtype is None:
                chunk = index.chunks(number)[0]
                data = (path / index.files()[chunk.file].name).read_bytes()
                entries[name] = data[chunk.offset : chunk.offset + chunk.length]
            else:
                entries[name] = (
                    str(tensor.dtype).removeprefix("torch."),
                    tuple(tensor.shape),
                    raw_bytes(tensor),
                )
        return entries


@pytest.mark.parametrize("read", [second_reader, this_package])
@pytest.mark.parametrize("case", conformance.cases(), ids=str)
def test_readers_conform(read, case, tmp_path):
    case.check(read, tmp_path)


def careless(path):
    """Looks at nothing but names."""
    return this_package(path) if (path / "index.dcprs").exists() else {}


def one_less(path):
    return dict(list(this_package(path).items())[1:])


def transposed(path):
    return {
        name: (entry[0], entry[1][::-1], entry[2]) if isinstance(entry, tuple) else entry
        for name, entry in this_package(path).items()
    }


def zeros(path):
    return {
        name: (*entry[:2], bytes(len(entry[2]))) if isinstance(entry, tuple) else entry
        for name, entry in this_package(path).items()
    }


def other_values(path):
    saved = torch.serialization.io.BytesIO()
    torch.save("another", saved)
    return {
        name: entry if isinstance(entry, tuple) else saved.getvalue()
        for name, entry in this_package(path).items()
    }


@pytest.mark.parametrize(
    ("read", "case", "message"),
    [
        (careless, "no index", "had to be refused"),
        (one_less, "rows", "missing"),
        (transposed, "rows", "another shape"),
        (zeros, "blocks", "another bytes"),
        (other_values, "values", "got"),
    ],
)
def test_a_reader_that_is_wrong_is_found(read, case, message, tmp_path):
    (chosen,) = (known for known in conformance.cases() if known.name == case)
    with pytest.raises(conformance.NonconformingError, match=message):
        chosen.check(read, tmp_path)


def test_cases_for_readers_without_digests():
    assert {case.name for case in conformance.cases()} - {
        case.name for case in conformance.cases(digests=False)
    } == {"payload"}
