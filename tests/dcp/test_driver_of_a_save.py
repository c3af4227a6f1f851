"""Which call of torch's ``save`` a thread is in is read from its frames, whatever else the process does."""

import sys

import pytest

from support import programs

#: Garbage that lets another thread run as it goes is collected at every turn, and other threads start threads.
READING_FRAMES = """
import gc, sys, threading, time
from dcp_rs.dcp import commits

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.0005)

def start_threads():
    while not done.is_set():
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join()

done = threading.Event()
others = [threading.Thread(target=start_threads, daemon=True) for _ in range(2)]
for thread in others:
    thread.start()
gc.set_threshold(1)
for _ in range(500):
    Garbage()
    assert commits._driver_of({"own": threading.current_thread(), "other": others[0]}[sys.argv[1]]) is None
assert gc.isenabled()
done.set()
"""


@pytest.mark.parametrize("whose", ["own", "other"])
def test_frames_are_read_while_garbage_is_collected(whose):
    programs.run([sys.executable, "-c", READING_FRAMES, whose], check=True, timeout=60)
