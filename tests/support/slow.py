"""A planner that lets a test decide when a save goes on."""

import threading

from dcp_rs import RsSavePlanner


class Slow(RsSavePlanner):
    """Waits for a word before it plans."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.begun.set()
        self.go.wait(60)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
