"""Loads what many ranks saved, each a file of its own: `files_worker.py PATH RANKS`, then load, verify."""

import sys
from pathlib import Path

from cases.places import by_ranks
from harness import loaders
from harness.driven import serve

PATH, PATTERN = Path(sys.argv[1]), by_ranks(int(sys.argv[2]))
STATE = PATTERN.blank()

serve({"load": lambda: loaders.ours(PATH, STATE), "verify": lambda: PATTERN.check(STATE)})
