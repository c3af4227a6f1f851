"""Transfers of bytes between files, host memory and devices."""
