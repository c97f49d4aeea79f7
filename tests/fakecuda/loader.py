"""Loads the stand-in's driver libraries in every Python of an environment: from then on their sonames find them."""

import ctypes
import os
from pathlib import Path

LIBRARIES = Path(__file__).parent / "torch" / "lib"
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARIES))
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # compute capability 9.0: cuDNN's attention is not here
for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
    ctypes.CDLL(str(LIBRARIES / name), mode=ctypes.RTLD_GLOBAL)
