"""Runs the scheduler's plans: backends, sampling, text, and the process that holds the model."""
