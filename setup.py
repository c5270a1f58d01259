"""The one thing pyproject.toml cannot say: how the C extension is compiled."""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# Python's limited interface makes one build serve every version from 3.11 on; a Python without a
# global lock does not have it.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
NATIVE = "src/cubegrad/backends/native"
# For a wheel that serves Windows too, whose compiler lacks POSIX threads and GCC's attributes.
PURE = os.environ.get("CUBEGRAD_PURE") == "1"

extension = Extension(
    "cubegrad.backends.native._native",
    [f"{NATIVE}/{name}.c" for name in ("module", "torch", "tensors", "step")],
    depends=sorted(map(str, Path(NATIVE).glob("*.h"))),
    extra_compile_args=[
        *("-O3", "-std=c11", "-pthread", "-Wall", "-Wextra"),
        # A step at lr 0 would move by the rounding of a product that is not rounded.
        "-ffp-contract=off",
        # Nothing reads errno or the exception flags, and without them loops vectorise.
        *("-fno-math-errno", "-fno-trapping-math"),
    ],
    extra_link_args=["-pthread"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
    py_limited_api=LIMITED,
    optional=True,  # without it the foreach backend steps CPU tensors
)
setup(
    ext_modules=[] if PURE else [extension],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED and not PURE else {},
)
