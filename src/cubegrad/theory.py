"""The paper's bounds, step sizes and minimisers: the public name of `cubegrad.family.theory`."""

from cubegrad.family.theory import *  # noqa: F403
