"""Checkpoints of other MADGRAD packages, read in."""

from cubegrad.state.interop import convert

__all__ = ["convert"]
