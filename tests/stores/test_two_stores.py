"""Two checkpoints, each on a store of its own."""

import sys

import pytest

import programs
from dcp_rs._url import StorageOptions
from dcp_rs.checkpoint.compare import compare
from dcp_rs.errors import StoragePermissionError
from support.object_server import object_server


@pytest.fixture
def other(tmp_path, saved):
    """A second store, which other credentials lead to."""
    _, folder = saved
    with object_server() as store:
        store.bucket = "other"
        store.put_folder(folder, "ckpt")
        store.access_key = "other-access-key"
        yield store


def test_a_comparison_has_options_for_each(saved, server, other, monkeypatch):
    left, right = server.url("runs/ckpt"), other.url("ckpt")
    mine, theirs = server.options(), other.options(aws_access_key_id="other-access-key")

    def use(of_right):
        options = {"": StorageOptions(mine), right: StorageOptions(of_right)}
        monkeypatch.setattr("dcp_rs._url._of_command_line", options)

    use(theirs)
    found = compare(left, right)
    assert found.differences == []
    assert found.bytes > 0
    same_store = {**theirs, "aws_access_key_id": "test-access-key"}
    use(same_store)
    with pytest.raises(StoragePermissionError):
        compare(left, right)
    use(theirs)
    _, folder = saved
    assert compare(folder, right).differences == []


@pytest.mark.slow
def test_the_command_line_tells_them_apart_by_their_urls(saved, server, other):
    def given(prefix, options):
        for key, value in options.items():
            text = str(value).lower() if isinstance(value, bool) else value
            yield from ("--storage-option", f"{prefix}{key}={text}")

    theirs = other.options(aws_access_key_id="other-access-key")
    command = ["diff", server.url("runs/ckpt"), other.url("ckpt")]
    general = list(given("", server.options()))

    def status(*arguments):
        return programs.run(
            [sys.executable, "-m", "dcp_rs", *arguments], capture_output=True, check=False
        ).returncode

    assert status(*command, *general, *given("s3://other:", theirs)) == 0
    assert len(other.requests) > 0
    assert status(*command, *general) == 2
