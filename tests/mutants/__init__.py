"""Plausible bugs, each of which the tests have to find: `make mutants`."""
