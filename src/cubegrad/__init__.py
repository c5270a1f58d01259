"""MADGRAD for PyTorch: the momentumized, adaptive, dual averaged gradient method."""

from cubegrad import interop
from cubegrad.optimizer import MADGRAD, MirrorMADGRAD

__version__ = "0.1.0"
__all__ = ["MADGRAD", "MirrorMADGRAD", "__version__", "interop"]
