"""Predicts memory, speed and cost without running a trial: of one configuration, a ranking, all GPUs, many devices."""
