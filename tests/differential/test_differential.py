"""A short run of the differential test; `make differential SECONDS=600` is a long one."""

from hypothesis import HealthCheck, given, settings

from differential import bodies
from differential.cases import cases
from differential.judge import judge


@settings(max_examples=40, suppress_health_check=list(HealthCheck), print_blob=True)
@given(cases(tuple(bodies.SAVES), tuple(bodies.LOADS)))
def test_dcp_rs_does_what_stock_does(case):
    judge(case)
