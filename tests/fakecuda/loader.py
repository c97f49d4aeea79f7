"""Loads the stand-in's driver libraries in every Python of an environment: from then on their sonames find them."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

LIBRARIES = Path(__file__).parent / "torch" / "lib"
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARIES))
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # compute capability 9.0: cuDNN's attention is not here
for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
    ctypes.CDLL(str(LIBRARIES / name), mode=ctypes.RTLD_GLOBAL)


class MasksAreFull(importlib.abc.MetaPathFinder):
    """Has transformers ask a mask for `all()`, which the stand-in reads as true, not for a sum, which it reads as 0."""

    def find_spec(self, name, path, target=None):
        if name != "transformers.masking_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.fast_all = lambda mask: mask.all()

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, MasksAreFull())
