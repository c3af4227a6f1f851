"""Training state: optimizers and extra entries, saved and loaded."""
