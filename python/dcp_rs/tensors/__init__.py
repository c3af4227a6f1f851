"""What torch holds: dtypes, memory, shards, trees of a state dict, and values that are no tensors."""
