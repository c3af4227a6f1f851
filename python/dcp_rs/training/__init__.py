"""The state of a training run: models, optimizers, and what rides along."""
