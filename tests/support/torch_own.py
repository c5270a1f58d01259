"""Run by test_torch_own.py: torch's own description of an optimizer, for ours, and its own tests.

    python torch_own.py                 lists errors that torch expects of all and ours do not raise
    python torch_own.py ~/pytorch       runs TestOptimRenewed of that checkout over our optimizers

A process of its own, since torch.testing._internal changes the one that imports it: it freezes
the flags of torch.backends and loads a hypothesis profile with few examples.
"""

import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import contract
import pytest
import torch
from torch.testing._internal import common_optimizers as own
from torch.testing._internal.common_methods_invocations import DecorateInfo


def inputs(cls: type, device: str, dtype: Any = None) -> list[Any]:  # noqa: ARG001
    configs = {case.config: case.options for case in contract.CASES if case.cls is cls}
    flags = set().union(*contract.IMPLEMENTATIONS.values())
    return [
        own.OptimizerInput(None, {k: v for k, v in options.items() if k not in flags}, config)
        for config, options in configs.items()
    ]


def skipped(test: str, reason: str) -> DecorateInfo:
    return DecorateInfo(unittest.skip(reason), "TestOptimRenewed", test)


def info(cls: type) -> Any:
    return own.OptimizerInfo(
        cls,
        optim_inputs_func=lambda device, dtype=None: inputs(cls, device, dtype),
        optim_error_inputs_func=own.get_error_inputs_for_all_optims,
        supported_impls=("foreach", "differentiable", "fused"),
        not_og_supported_flags=("foreach", "differentiable", "fused", "maximize", "capturable"),
        has_capturable_arg=True,
        supports_fused_on=("cpu", "cuda"),
        # Sparse gradients need momentum 0, and torch's test keeps the momentum of each input.
        supports_sparse=False,
        skips=(
            skipped("test_errors", "test_torch_own.py asks for these errors one by one"),
            skipped("test_fused_error_on_params_on_meta", "the message is ours"),
            skipped("test_defaults_changed_to_foreach", "the default is the fused backend"),
            skipped("test_set_default_dtype_works_with_foreach", "steps are counted in float32"),
        ),
    )


def missing_errors(optim_info: Any) -> list[str]:
    """The inputs that should raise this error and do not."""
    missing = []
    for expected in optim_info.optim_error_inputs_func("cpu", torch.float32):
        case = expected.optimizer_error_input
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optim_info.optim_cls(case.params, **case.kwargs)
        except expected.error_type:
            continue
        except Exception as error:
            missing.append(f"{optim_info.name}: {case.desc}: {type(error).__name__}")
        else:
            missing.append(f"{optim_info.name}: {case.desc}: no error")
    return missing


def main() -> int:
    infos = [info(cls) for cls in contract.CLASSES]
    if not sys.argv[1:]:
        print("\n".join(line for each in infos for line in missing_errors(each)))  # noqa: T201
        return 0
    tests = Path(sys.argv[1]).expanduser() / "test"
    own.optim_db[:] = infos
    sys.path.insert(0, str(tests))
    options = ["-q", "-k", "TestOptimRenewed", "-c", "/dev/null", "-p", "no:cacheprovider"]
    return int(pytest.main([str(tests / "test_optim.py"), *options]))


if __name__ == "__main__":
    sys.exit(main())
