"""Tensors and values as torch has them: dtypes, memory, shards, nested state dicts, pickles."""
