"""Where optimizers that were pickled whole by older versions look for their classes."""

from cubegrad.optim import MADGRAD, MirrorMADGRAD

__all__ = ["MADGRAD", "MirrorMADGRAD"]
