"""The text of writers and planners: the call that makes them."""

import pytest
import torch

from dcp_rs import RsSavePlanner, RsWriter


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (lambda: RsWriter("ckpt"), "RsWriter('ckpt')"),
        (
            lambda: RsWriter("ckpt", thread_count=2, sync_files=False, overwrite=False),
            "RsWriter('ckpt', threads=2, fsync=False, overwrite=False)",
        ),
        (lambda: RsWriter("new", parent="old"), "parent="),
        (
            lambda: RsWriter("s3://b/c", storage_options={"secret_access_key": "hidden"}),
            "RsWriter('s3://b/c')",
        ),
        (RsSavePlanner, "RsSavePlanner()"),
        (
            lambda: RsSavePlanner(dtype=torch.bfloat16, include="model.*"),
            "RsSavePlanner(dtype=torch.bfloat16, include='model.*')",
        ),
        (lambda: RsSavePlanner(exclude=["x" * 99, "y" * 99, "z" * 99]), "...)"),
    ],
)
def test_the_text_is_the_call(made, want):
    text = repr(made())
    assert want in text
    assert len(text) <= 200
    assert "hidden" not in text
