"""A short run of the differential test; `make differential SECONDS=600` is a long one."""

import pytest
from hypothesis import HealthCheck, given, settings

from differential import bodies
from differential.cases import cases
from differential.judge import judge


@pytest.mark.timeout(
    900
)  # where it fails, the smallest case is looked for; a hang of its ranks ends much sooner
@settings(max_examples=6, suppress_health_check=list(HealthCheck), print_blob=True)
@given(cases(tuple(bodies.SAVES), tuple(bodies.LOADS)))
def test_dcp_rs_does_what_stock_does(case):
    judge(case)
