"""The estimate of what a run keeps, against what a step leaves allocated."""

import gc
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import refused
from torch import nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, memory
from cubegrad.study import cli

ROOT = Path(__file__).parents[2]


class Transformer(nn.Module):
    """Embeddings that the head shares, blocks, a frozen table."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.positions = nn.Parameter(torch.randn(64, 96), requires_grad=False)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(96, 4, 300) for _ in range(2)))
        self.head = nn.Linear(96, 500, bias=False)
        self.head.weight = self.embedding.weight


def res_net():
    """Convolutions with batch norms, whose statistics are buffers."""
    layers = [[nn.Conv2d(a, b, 3), nn.BatchNorm2d(b)] for a, b in ((3, 16), (16, 60), (60, 64))]
    return nn.Sequential(*itertools.chain(*layers), nn.Flatten(), nn.Linear(64, 10))


def mixed():
    """Half precision with float32 norms, and a complex matrix."""
    model = nn.Sequential(nn.Linear(257, 65), nn.LayerNorm(65)).bfloat16()
    model[1].float()
    model.rotation = nn.Parameter(torch.randn(70, 80, dtype=torch.complex64))
    return model


MODELS = {
    "transformer": Transformer,
    "transformer in bfloat16": lambda: Transformer().bfloat16(),
    "convolutions": res_net,
    "convolutions in bfloat16": lambda: res_net().bfloat16(),
    "convolutions in float64": lambda: res_net().double(),
    "mixed": mixed,
}


def prodigy(params):
    if any(param.is_complex() for param in params):
        pytest.skip("Prodigy takes no complex parameters")
    return pytest.importorskip("prodigyopt").Prodigy(params)


BUILD = {
    "MADGRADW compact, gradient release": lambda params: MADGRADW(params, compact=True),
    "MADGRADW compact": lambda params: MADGRADW(params, compact=True),
    "MADGRADW compact, momentum 0": lambda params: MADGRADW(params, compact=True, momentum=0.0),
    "MADGRADW, float32 state": MADGRADW,
    "MADGRADW lr auto, compact": lambda params: MADGRADW(params, lr="auto", compact=True),
    "MADGRADW lr auto, float32 state": lambda params: MADGRADW(params, lr="auto"),
    "MADGRAD compact, gradient release": lambda params: MADGRAD(params, compact=True),
    "MADGRAD compact": lambda params: MADGRAD(params, compact=True),
    "MADGRAD compact, momentum 0": lambda params: MADGRAD(params, compact=True, momentum=0.0),
    "MADGRAD, float32 state": MADGRAD,
    "MirrorMADGRAD compact": lambda params: MirrorMADGRAD(params, compact=True),
    "MirrorMADGRAD, float32 state": MirrorMADGRAD,
    "Adam, AdamW (torch)": torch.optim.AdamW,
    "AdamW, float32 master weights": torch.optim.AdamW,
    "SGD with momentum (torch)": lambda params: torch.optim.SGD(params, momentum=0.9),
    "Prodigy (prodigyopt)": prodigy,
}
each_optimizer = pytest.mark.parametrize("name", BUILD)


def step(model, name):
    """The tensors that an optimizer keeps after a step."""
    params = [param for param in model.parameters() if param.requires_grad]
    own = params
    if "master" in name:
        wide = [torch.promote_types(param.dtype, torch.float32) for param in params]
        own = [nn.Parameter(p.detach().to(d)) for p, d in zip(params, wide, strict=True)]
    for param in (*params, *own):
        param.grad = torch.ones_like(param)
    optimizer = BUILD[name](own)
    optimizer.step()
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    masters = [copy for copy, param in zip(own, params, strict=True) if copy.dtype != param.dtype]
    for copy in masters:
        copy.grad = None
    return [value for value in (*masters, *state) if isinstance(value, torch.Tensor)]


def allocated(tensors):
    storages = {tensor.untyped_storage() for tensor in tensors}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values())


def row(result, name):
    (found,) = [row for row in result.rows if row.optimizer == name]
    return found


@each_optimizer
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_counted_as_it_is_allocated(model, name):
    net = MODELS[model]()
    kept = row(memory.estimate(net), name)
    state = step(net, name)
    gradients = [param.grad for param in net.parameters() if param.grad is not None]
    assert kept.weights == allocated([*net.parameters(), *net.buffers()])
    assert kept.gradients == (0 if "release" in name else allocated(gradients))
    if "Prodigy" in name:  # no p0 for zeros, such as fresh biases
        assert kept.state == pytest.approx(allocated(state), rel=0.02)
    else:
        assert kept.state == allocated(state)
    assert kept.total == kept.weights + kept.gradients + kept.state


def test_every_optimizer_is_compared():
    assert [row.optimizer for row in memory.estimate(1e6).rows] == list(BUILD)


def requested_bytes():
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


@each_optimizer
@pytest.mark.parametrize("dtype", ["bf16", "float32"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_allocates_what_is_estimated(dtype, name):
    """The rest are the addresses that a kernel reads.

    `memory_allocated` would add what the allocator's free blocks are too large by: up to 1 MiB per
    tensor, depending on the tests before.
    """
    gc.collect()  # what earlier tests left
    before = requested_bytes()
    with torch.device("cuda"):
        layers = [nn.TransformerEncoderLayer(1024, 8, 4096) for _ in range(2)]
    model = nn.Sequential(*layers).to(memory.DTYPES[dtype])
    state = step(model, name)
    if "release" in name:
        model.zero_grad()
    kept = row(memory.estimate(model), name)
    assert requested_bytes() - before == pytest.approx(kept.total, rel=0.02)
    del state


def test_shapes_and_a_model_agree():
    net = Transformer().bfloat16()
    net.positions.requires_grad_()
    shapes = [tuple(param.shape) for param in net.parameters()]
    assert memory.estimate(shapes, "bf16") == memory.estimate(net)


def test_a_model_without_memory_is_counted():
    with torch.device("meta"):
        without = Transformer()
    assert memory.estimate(without) == memory.estimate(Transformer())


def test_a_number_of_parameters_is_close_to_a_large_model():
    """GPT-2-large; norms and biases make up to 0.6 % of its state, of MADGRADW at momentum 0."""
    from shared.shapes import gpt2

    for dtype in ("bf16", "float32"):
        exact = memory.estimate(gpt2(36, 1280, 50257, 1024), dtype)
        assert exact.parameters == 774_030_080
        rough = memory.estimate(exact.parameters, dtype)
        assert rough.assumption
        assert not exact.assumption
        for kept, other in zip(exact.rows, rough.rows, strict=True):
            assert kept[1:] == pytest.approx(other[1:], rel=0.006)


def test_gpus_divide_the_rows():
    whole, shared = (memory.estimate([(1000, 300), (8,)], "bf16", gpus) for gpus in (1, 8))
    for one, part in zip(whole.rows, shared.rows, strict=True):
        assert part.weights == one.weights / 8
        assert part.state == pytest.approx(one.state / 8, rel=1e-3)  # each has a step count
    uneven = memory.estimate([(9, 1000), ()], "float32", gpus=8)
    assert uneven.rows[0].weights == 2 * 1000 * 4 + 4
    coded = row(uneven, "MADGRAD compact")  # 9,000 elements are coded, though a shard has 2,000
    assert coded.state == 4 * 2 * 1000 + 3 * 2 * 4 * 4 + 4 + 12 + 4
    for one, part in zip(memory.estimate(7e9).rows, memory.estimate(7e9, gpus=8).rows, strict=True):
        assert part[1:] == pytest.approx([size / 8 for size in one[1:]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "is 0 and must be finite and >= 1; use 7e9"),
        ((float("nan"),), "is nan and must be finite"),
        ((10**400,), "is 1000000000.* and must be finite"),
        ((True,), "is True and must be finite"),
        ((None,), "is None and must be finite"),
        (([],), "has 0 parameters and must have some"),
        (([(3, -1)],), r"a shape is \(3, -1\); it must be a tuple of whole numbers >= 0"),
        (("7B",), "a shape is '7'; it must be"),
        (([torch.ones(3)],), "a shape is a tensor; it must be .* or the module itself"),
        ((1e9, "int8"), "dtype='int8' must be a floating-point type; use bf16,"),
        ((1e9, "bf16", 0), r"gpus=0 must be a whole number >= 1 and < 2\^63; use 1"),
        ((1e9, "bf16", 2**63), "gpus=9223372036854775808 must be a whole number"),
        ((1e9, "bf16", 1.5), "gpus=1.5 must be"),
        ((nn.Linear(2, 2), "bf16"), "dtype='bf16' is for shapes .* model.to"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        memory.estimate(*arguments)


WRONG = (
    "seven", "7x", "B", "7BB", "7,000", "0", "0.5", "-7B", "0.0001k", "nanB", "inf", "infB",
    "1e400", "1e308T", "1e999999999999", "0x7B", "7e", "7B7",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("memory", "required: --params"),
        *((f"memory --params={n}", f"{n} must be a finite number >= 1, with k, M") for n in WRONG),
        ("memory --params=", "must be a finite number >= 1"),
        ("memory --params 1e9 --dtype int4", "dtype='int4' must be a floating-point type; use"),
        ("memory --params 1e9 --gpus 0", "0 must be a whole number >= 1 and < 2^63; use 1"),
        *(
            (
                f"memory --params 1e9 --gpus={n}",
                f"{n:.60} must be a whole number >= 1 and < 2^63; use",
            )
            for n in (str(2**63), "9" * 310, "9" * 5000, "²", "--8", "-1")
        ),
    ],
)
def test_the_command_refuses_bad_input_in_one_line(words, what, capsys):
    assert what in refused(words, capsys)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7B", 7_000_000_000),
        ("2.3B", 2_300_000_000),
        (".5g", 500_000_000),
        ("350M", 350_000_000),
        ("1.5k", 1_500),
        ("1.2T", 1_200_000_000_000),
        ("1.5e9", 1_500_000_000),
        ("7_000_000_000", 7_000_000_000),
        ("58144842", 58_144_842),
        ("1", 1),
    ],
)
def test_numbers_of_parameters_as_people_write_them(text, number, capsys):
    assert cli.main(["memory", "--params", text]) == 0
    assert capsys.readouterr().out.startswith(f"{number:,} parameters in float32, on one GPU")


@pytest.mark.parametrize(
    ("dtype", "is_half"), [("bf16", True), ("fp16", True), ("fp32", False), ("fp64", False)]
)
def test_the_table_says_where_torch_keeps_state_in_half_precision(dtype, is_half):
    result = memory.estimate(1e9, dtype)
    assert (memory.HALF in memory.table(result)) == is_half
    narrow = row(result, "Adam, AdamW (torch)").state
    assert (narrow < row(result, "AdamW, float32 master weights").state) == is_half


def test_the_command_prints_what_the_docs_show(capsys):
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    ((words, shown),) = re.findall(r"\$ cubegrad (memory .*?)\n(.*?)```", page, re.DOTALL)
    assert cli.main(words.split()) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.processes
def test_the_command_needs_no_extra():
    script = (
        "import sys; sys.modules.update(tqdm=None, sklearn=None, matplotlib=None); "
        "from cubegrad.study.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "memory", "--params", "1e9", "--gpus", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1,000,000,000 parameters in float32, on each of 4 GPUs (FSDP)" in done.stdout
