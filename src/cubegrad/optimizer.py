"""Where optimizers that were pickled whole before version 0.2 look for their classes."""

from cubegrad.optim import MADGRAD, MirrorMADGRAD

__all__ = ["MADGRAD", "MirrorMADGRAD"]
