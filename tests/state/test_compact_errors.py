"""Codes that do not fit are refused, and nothing has changed then."""

import copy

import cases
import pytest
import torch
from compact_runs import SHAPES, build, state_tensors
from short_runs import advance, parameters

from cubegrad import MADGRAD, MirrorMADGRAD


def changed(saved, key=1, **entries):
    state = saved["state"][key] | entries
    kept = {name: value for name, value in state.items() if value is not None}
    return {**saved, "state": {**saved["state"], key: kept}}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offset_scale", None, r"'offset_code', .* or step and with compact=True \[.*load what"),
        ("offset_code", None, r"the state of parameter 1 is .*'offset_scale'"),
        ("root_scale", None, r"the state of parameter 1 is"),
        ("initial_scale", None, r"the state of parameter 1 is"),
        ("step", None, r"the state of parameter 1 is"),
        ("root_code", lambda t: t.int(), r"root_code of parameter 1 is torch.int32; .*torch.uint8"),
        (
            "offset_code",
            lambda t: t.float(),
            r"offset_code .* torch.float32; .* must be torch.int8",
        ),
        ("initial_code", lambda t: t.float(), r"initial_code .* torch.float32; .*torch.int16"),
        ("initial_code", lambda t: t[:, 2:], r"initial_code .* of shape \(16, 598\)"),
        ("root_code", lambda t: t[1:], r"root_code of parameter 1 .* of shape \(15, 300\)"),
        ("root_scale", lambda t: t[:, :1], r"root_scale of parameter 1 .* of shape \(16, 1\)"),
        ("root_scale", lambda t: -t, r"smallest value of root_scale .*-.*; it must be finite"),
        ("offset_scale", lambda t: t / 0, r"value of offset_scale of parameter 1 is (inf|nan)"),
        ("initial_scale", lambda t: t * torch.nan, r"value of initial_scale of parameter 1 is nan"),
    ],
)
def test_wrong_codes_are_refused_whole(name, value, message):
    params = parameters(SHAPES[:2])
    optimizer = advance(build(MADGRAD, params), params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, params, range(2, 4))
    entry = None if value is None else value(saved["state"][1].get(name))
    with (
        cases.no_change(*params, *state_tensors(optimizer, params)),
        pytest.raises(ValueError, match=message),
    ):
        optimizer.load_state_dict(changed(saved, **{name: entry}))
    assert optimizer.state[params[0]]["step"] == 4


def test_codes_of_another_method_or_dtype_are_refused():
    saved = {}
    for cls in (MADGRAD, MirrorMADGRAD):
        params = parameters(SHAPES[:2])
        saved[cls] = advance(build(cls, params), params, range(1)).state_dict()
    with pytest.raises(ValueError, match="it is mirror_madgrad's, load it there"):
        build(MADGRAD, parameters(SHAPES[:2])).load_state_dict(saved[MirrorMADGRAD])
    with pytest.raises(ValueError, match="it is madgrad's, load it there"):
        build(MirrorMADGRAD, parameters(SHAPES[:2])).load_state_dict(saved[MADGRAD])
    half = parameters(SHAPES[:2], torch.bfloat16)
    with pytest.raises(ValueError, match=r"uint8; codes for a parameter of torch.bfloat16 must be"):
        build(MADGRAD, half).load_state_dict(saved[MADGRAD])
    half_saved = advance(build(MADGRAD, half), half, range(1)).state_dict()
    with pytest.raises(ValueError, match=r"bfloat16; codes for a parameter of torch.float32 must"):
        build(MADGRAD, parameters(SHAPES[:2])).load_state_dict(half_saved)
