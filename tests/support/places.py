"""Where things are in the source tree."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
#: Checkpoints that stock torch made: a folder for each release.
STOCK = TESTS / "fixtures" / "stock"
