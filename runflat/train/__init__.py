"""Training under one plan: data, checkpoints, the step, the worker process."""
