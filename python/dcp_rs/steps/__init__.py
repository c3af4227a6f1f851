"""The steps of a training run: which there are, which stay, and a manager that saves and resumes them."""
