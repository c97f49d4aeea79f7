"""The parts of `gpu_pack.py`: what is looked at, how it is judged, and where that is written."""
