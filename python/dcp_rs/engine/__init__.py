"""Loads and saves of this package: arguments only, none of torch's plug-in types."""
