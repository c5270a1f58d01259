"""Checkpoints of states in codes: as small as the state, read by torch's safe loaders."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compact_runs import same_runs
from short_runs import advance, parameters, peak_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
LIMITS = {(MADGRAD, 0.9): 4.2, (MADGRAD, 0.0): 3.2, (MirrorMADGRAD, 0.9): 2.2}
LIMITS |= {(MADGRADW, 0.9): 2.2, (MADGRADW, 0.0): 1.2}
each_limit = pytest.mark.parametrize(
    ("cls", "momentum"), LIMITS, ids=lambda value: getattr(value, "__name__", value)
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(600, 512), (1024, 300), (512,), (300,)]


def built(cls, momentum, dtype, lr=0.05):
    model = nn.Module()
    model.all = nn.ParameterList(parameters(SHAPES, dtype))
    return model, cls(model.parameters(), lr=lr, momentum=momentum, compact=True)


def stepped(*setting):
    model, optimizer = built(*setting)
    advance(optimizer, model.parameters(), range(3))
    return model, optimizer


def check(run, resumed):
    """Both runs go on with the same bits."""
    for model, optimizer in (run, resumed):
        advance(optimizer, model.parameters(), range(3, 5))
    (model, optimizer), (other_model, other) = run, resumed
    assert same_runs([*model.parameters()], optimizer, [*other_model.parameters()], other)


@each_limit
@each_dtype
def test_a_file_of_torch_save(dtype, cls, momentum, tmp_path):
    run = stepped(cls, momentum, dtype)
    model, optimizer = run
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    elements = sum(param.numel() for param in model.parameters())
    assert (tmp_path / "optimizer.pt").stat().st_size <= LIMITS[cls, momentum] * elements
    for mmap in (False, True):
        resumed = built(cls, momentum, dtype, lr=0.7)
        for name, part in zip(("model.pt", "optimizer.pt"), resumed, strict=True):
            part.load_state_dict(torch.load(tmp_path / name, weights_only=True, mmap=mmap))
        check(stepped(cls, momentum, dtype), resumed)


@each_limit
@each_dtype
def test_a_distributed_checkpoint_of_one_process(dtype, cls, momentum, tmp_path):
    """Without a process group, as a run on one GPU saves it."""
    run = stepped(cls, momentum, dtype)
    elements = sum(param.numel() for param in run[0].parameters())
    dcp.save({"optimizer": get_optimizer_state_dict(*run)}, checkpoint_id=tmp_path / "optimizer")
    size = sum(file.stat().st_size for file in (tmp_path / "optimizer").iterdir())
    # Each tensor takes about 1.5 kB of its own, together 0.1 bytes a parameter of this small model.
    assert size <= (LIMITS[cls, momentum] + 0.1) * elements
    weights, state = get_state_dict(*run)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "all")
    resumed = built(cls, momentum, dtype, lr=0.7)
    weights, state = get_state_dict(*resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "all")
    set_state_dict(*resumed, model_state_dict=weights, optim_state_dict=state)
    check(run, resumed)


# torch 2.11's profiler warns so once in each process.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@each_limit
@each_dtype
def test_loading_allocates_what_it_keeps(dtype, cls, momentum):
    """Beside it, the comparison of one tensor's codes with zero."""
    model, optimizer = stepped(cls, momentum, dtype)
    saved = optimizer.state_dict()
    held = [tensor for state in saved["state"].values() for tensor in state.values()]
    _, other = built(cls, momentum, dtype)
    largest = max(param.numel() for param in model.parameters())
    assert (
        peak_of(lambda: other.load_state_dict(saved))
        <= sum(t.nbytes for t in held) + largest + 4096
    )
