"""The steps of a training run: the manager, its stores of steps, and retention."""
