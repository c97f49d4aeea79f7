"""A stand-in for CUDA: torch's CUDA build on a machine without a GPU, for the memory of trainings that run here."""
