"""Who runs the workers: the launcher that starts and watches them, and the controller that keeps the run's books."""
