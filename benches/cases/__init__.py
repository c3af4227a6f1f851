"""The families of cases, in the order in which they run. Each has `run(context)`, which returns rows."""

FAMILIES = {
    "warm": "everything in the page cache, into preallocated tensors; and what verify costs",
    "cold": "nothing in the page cache",
    "small": "many small tensors",
    "metadata": "very many chunks: the metadata and the plan of one rank",
    "reshard": "saved by rows, loaded by columns",
    "serial": "what of a load more cores do not make shorter",
    "ranks": "several ranks of a machine at once, from a cold disk",
    "save": "saving, with fsync",
    "steps": "steps of a run that trains adapters of a frozen backbone",
    "stall": "what a save in the background costs the training step that it begins in",
    "memory": "anonymous memory while loading",
    "views": "opening a checkpoint and touching every name",
    "one_file": "load_file and save_file",
    "foreign": "checkpoints of others, in place",
    "torch_file": "files of torch.save",
    "remote": "from a store, on this machine",
    "places": "folders of many files, files that open late, overlayfs, and processes that only look",
    "looking": "reports, logs, statistics, NumPy: what it costs to look",
    "peers": "other loaders",
}

#: Not in the table: `--scaling`.
SCALING = "scaling"
