"""Compile the Triton kernels of a step for an H100, which needs no GPU."""

import itertools
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cubegrad.backends.triton.coded import step_coded_units
from cubegrad.backends.triton.kernel import step_units
from cubegrad.backends.triton.launch import fields
from cubegrad.rule import (
    MADGRAD,
    MADGRADW,
    MADGRADW_AUTO,
    MIRROR_MADGRAD,
    RULES,
    SCHEDULE_FREE,
    SCHEDULE_FREE_AUTO,
)

NUMBERS = ("lr", "momentum", "shrink", "mean_share", "eps", "decay", "sign")
POINTERS = dict.fromkeys(("lr_at", "momentum_at", "shrink_at", "mean_share_at"), "*fp64")
POINTERS |= {"found_inf": "*fp32", "grad_scale": "*fp32", "sums": "*fp64"}
TABLES = {"rows": "*i64", "grads": "*i64", "units": "*i32", "ticket": "*i32"}


FIELDS = "ROOT", "GROWTH_ROOT", "SQUARES", "PULLS", "HOLDS", "RELATIVE", "AVERAGES", "ANCHORED"


def of_rule(rule):
    return dict(zip(FIELDS, fields(rule), strict=True))


def compile_kernel(kernel, constants, tensors, warps, registers):
    if not (constants["PULLS"] or constants["ANCHORED"]):
        tensors = [name for name in tensors if name != "sums"]
    names = kernel.arg_names
    count = "span" if "span" in names else "length"
    signature = dict.fromkeys(names, "constexpr") | TABLES | {"n_rows": "i32", count: "i32"}
    signature |= dict.fromkeys(NUMBERS, "i64")
    signature |= {name: POINTERS[name] for name in tensors}
    known = {name: None for name in POINTERS if name not in tensors} | constants
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in known.items()},
    )
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_for_codes():
    for rule, has_offset, whole in itertools.product(RULES, (True, False), (True, False)):
        if (rule.averages or rule.anchored) and not has_offset:  # a mean needs momentum
            continue
        for dtype in (tl.float32,) if rule.anchored else (tl.float32, tl.bfloat16):
            constants = {"HAS_OFFSET": has_offset, "P": dtype, "G": dtype} | of_rule(rule)
            constants |= {"ALL_WHOLE": whole, "LOW_BIT": int(whole)}
            constants |= {"PLAIN": whole, "SHRINKS": not whole, "NO_EPS": not whole}
            tensors = ["sums"] if whole and rule.anchored else [] if whole else list(POINTERS)
            compile_kernel(step_coded_units, constants, tensors, 1, 64 if whole else 96)


def compile_for_sums():
    dtypes = [(tl.float32, tl.float32, False), (tl.float64, tl.float64, False)]
    dtypes += [(half, tl.float32, r) for half in (tl.bfloat16, tl.float16) for r in (False, True)]
    for rule, has_point, sums in (
        *((MADGRAD, True, True), (MADGRAD, False, False), (MIRROR_MADGRAD, True, False)),
        *((MADGRADW, True, False), (MADGRADW, False, False), (SCHEDULE_FREE, True, False)),
        *((MADGRADW_AUTO, True, True), (SCHEDULE_FREE_AUTO, True, True)),
    ):
        for dtype, state, at_random in dtypes[:3] if rule.anchored else dtypes:
            constants = {"HAS_POINT": has_point, "P": dtype, "G": dtype} | of_rule(rule)
            constants |= {"S": state, "BLOCK": 1024, "AT_RANDOM": at_random}
            tensors = list(POINTERS) if sums else []
            for decays in (False, True) if sums else (False,):
                own = constants | {"DECAYS": decays}
                compile_kernel(step_units, own, tensors, 4, 80 if sums else 64)


if __name__ == "__main__":
    compile_for_codes()
    compile_for_sums()
    sys.stdout.write("compiled\n")
