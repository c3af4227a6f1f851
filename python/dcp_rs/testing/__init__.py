"""For the tests of programs that save and load, and of readers of the format.

:mod:`dcp_rs.testing.compare` and :mod:`dcp_rs.testing.states` need nothing but torch, and so do
:mod:`dcp_rs.testing.disk` and :mod:`dcp_rs.testing.conformance`. :mod:`dcp_rs.testing.strategies`
needs hypothesis: ``pip install 'dcp-rs[testing]'``.
"""
