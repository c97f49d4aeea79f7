"""The answer of a search as files for others: training scripts, and files that launchers and libraries read."""
