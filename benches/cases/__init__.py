"""The families of cases, in the order in which they run. Each has `run(context)`, which returns rows."""

FAMILIES = {
    "warm": "everything in the page cache, into preallocated tensors; and what verify costs",
    "offsets": "the same, into tensors at different distances from the start of a page",
    "cold": "nothing in the page cache",
    "small": "many small tensors",
    "metadata": "very many chunks: the metadata and the plan of one rank",
    "reshard": "saved by rows, loaded by columns",
    "serial": "what of a load more cores do not make shorter",
    "ranks": "several ranks of a machine at once, from a cold disk",
    "save": "saving, with fsync",
    "restart": "a save, and restores in new processes after it",
    "steps": "steps of a run that trains adapters of a frozen backbone",
    "nodes": "saves to the disks of nodes, and restores after one of them is lost",
    "stall": "what a save in the background costs the training step that it begins in",
    "memory": "anonymous memory while loading",
    "views": "opening a checkpoint and touching every name",
    "one_file": "load_file and save_file",
    "foreign": "checkpoints of others, in place",
    "merge": "the mean of four checkpoints",
    "torch_file": "files of torch.save",
    "quantized": "quantized weights, and experts stacked",
    "remote": "from a store, on this machine",
    "places": "folders of many files, files that open late, overlayfs, and processes that only look",
    "looking": "reports, logs, statistics, NumPy: what it costs to look",
    "peers": "other loaders",
}

#: Not in the table, but with `--scaling`: functions of `scaling`, each in place of a `run`.
SCALING = "scaling"
QUANTITIES = {
    "nbytes": "of 64 tensors that grow, loaded and saved",
    "tensors": "to 1,000,000 small ones, loaded and saved",
    "chunks": "to 1,000,000: the metadata and the plan of one rank",
    "ranks": "that saved, to 16,384: the same",
    "files": "to 100,000, loaded",
}
