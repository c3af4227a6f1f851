"""Tools for tests of programs that save and load, and of readers of the format.

:mod:`dcp_rs.testing.strategies` needs hypothesis: ``pip install 'dcp-rs[testing]'``. The other
modules need only torch.
"""
