"""Compile the Triton kernel for states in codes for an H100, which needs no GPU."""

import itertools
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cubegrad.backends.triton.coded import step_coded_units

NUMBERS = ("lr", "momentum", "shrink", "eps", "decay", "sign")
POINTERS = {"lr_at": "*fp64", "momentum_at": "*fp64", "shrink_at": "*fp64"}
POINTERS |= {"found_inf": "*fp32", "grad_scale": "*fp32", "sums": "*fp64"}
TABLES = {"rows": "*i64", "grads": "*i64", "units": "*i32", "ticket": "*i32"}


def compile_kernel(constants, tensors, registers):
    names = step_coded_units.arg_names
    signature = dict.fromkeys(names, "constexpr") | TABLES | {"n_rows": "i32", "span": "i32"}
    signature |= dict.fromkeys(NUMBERS, "i64")
    signature |= {name: POINTERS[name] for name in tensors}
    known = {name: None for name in POINTERS if name not in tensors} | constants
    source = ASTSource(
        fn=step_coded_units,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in known.items()},
    )
    options = {"num_warps": 1, "maxnreg": registers, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main():
    variants = itertools.product(("madgrad", "mirror_madgrad"), (True, False), (True, False))
    for method, has_offset, whole in variants:
        for dtype in (tl.float32, tl.bfloat16):
            constants = {"METHOD": method, "HAS_OFFSET": has_offset, "P": dtype, "G": dtype}
            constants |= {"ALL_WHOLE": whole, "PLAIN": whole, "NO_EPS": not whole}
            tensors = [] if whole else list(POINTERS)
            if method != "madgrad":
                tensors = [name for name in tensors if name != "sums"]
            compile_kernel(constants, tensors, 64 if whole else 96)
    sys.stdout.write("compiled\n")


if __name__ == "__main__":
    main()
