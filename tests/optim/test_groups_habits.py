"""cubegrad.param_groups over wrapped models, and in optimizers that are saved and loaded."""

import io

import pytest
import torch
from group_models import ResNet, llama, names, options
from torch import nn
from torch.optim import SGD, AdamW

import cubegrad
from cubegrad import MADGRAD, param_groups


def wrapped_as(wrapper, model, monkeypatch):
    if wrapper == "compiled":
        return torch.compile(model)
    if wrapper == "ddp":
        monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", nn.Module.__init__)
        outer = nn.parallel.DistributedDataParallel()
        outer.module = torch.compile(model)
        return outer
    wrap = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper
    model.layer1[0] = wrap(model.layer1[0])
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("wrapper", ["compiled", "ddp", "checkpointed"])
def test_wrappers_change_neither_groups_nor_patterns(wrapper, monkeypatch):
    chosen = {"lr": 1.0, "layer_decay": 0.5, "patterns": {"layer1.0.conv1": {"lr": 3.0}}}
    model = ResNet()
    plain = param_groups(model, **chosen)
    wrapped = param_groups(wrapped_as(wrapper, model, monkeypatch), **chosen)
    assert options(wrapped) == options(plain)
    for one, other in zip(wrapped, plain, strict=True):
        assert list(map(id, one["params"])) == list(map(id, other["params"]))


def test_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(llama(), config)
    patterns = {"model.layers.1.*.lora_B": {"lr": 16.0}}
    groups = param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5, patterns=patterns)
    start, end = "base_model.model.model.layers", "default.weight"
    q = "self_attn.q_proj"
    assert names(model, groups) == {
        "decay/model.layers.1.*.lora_B": [f"{start}.1.{q}.lora_B.{end}"],
        "depth_1/decay": [f"{start}.0.{q}.lora_{x}.{end}" for x in "AB"],
        "depth_1/no_decay": [f"{start}.0.{q}.lora_magnitude_vector.{end}"],
        "depth_2/decay": [f"{start}.1.{q}.lora_A.{end}"],
        "depth_2/no_decay": [f"{start}.1.{q}.lora_magnitude_vector.{end}"],
    }


@pytest.fixture
def one_process(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_models_and_their_flat_checkpoints():
    from torch.distributed.checkpoint import state_dict as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        expected = names(model, param_groups(model, lr=0.1, layer_decay=0.5))
        model = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        groups = param_groups(model, lr=0.1, layer_decay=0.5)
        assert names(model, groups) == expected
        return model, MADGRAD(groups, weight_decay=0.1, momentum=0.5)

    model, optimizer = build()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    flat = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = dcp.get_optimizer_state_dict(model, optimizer, options=flat)
    again, resumed = build()
    dcp.set_optimizer_state_dict(again, resumed, saved, options=flat)
    assert options(resumed.param_groups) == options(optimizer.param_groups)
    assert resumed.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


# Optimizers


@pytest.mark.parametrize("cls", [MADGRAD, AdamW, SGD])
def test_a_checkpoint_of_one_run_loads_in_the_next(cls):
    def build():
        torch.manual_seed(0)
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 4, dropout=0), 2, enable_nested_tensor=False
        )
        groups = param_groups(model, lr=0.1, weight_decay=0.1, layer_decay=0.5)
        return model, cls(groups, lr=0.1)

    def train(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 1, 4)).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    again, resumed = build()
    weights, state = torch.load(file, weights_only=True)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert [g["name"] for g in resumed.param_groups][:2] == ["depth_1/decay", "depth_1/no_decay"]
    train(model, optimizer)
    train(again, resumed)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_factors_of_an_estimated_rate():
    torch.manual_seed(0)
    model = ResNet()
    chosen = {"lr": "auto", "layer_decay": 0.5, "patterns": {"layer2": {"lr": 3.0}}}
    with pytest.raises(ValueError, match="lr='auto' must be given for all groups"):
        MADGRAD(param_groups(model, **chosen))
    optimizer = MADGRAD(param_groups(model, **chosen), lr="auto")
    found = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert (found["depth_1/decay"], found["depth_3/decay"], found["decay/layer2"]) == (0.25, 1, 3)
    model.conv1(torch.ones(1, 3, 9, 9)).square().sum().backward()
    optimizer.step()
    assert cubegrad.estimated_lr(optimizer) > 0
    assert MADGRAD(param_groups(model, lr="auto")).param_groups[0]["auto_lr"]


def test_a_rate_that_is_a_tensor():
    (first, *_, last) = param_groups(ResNet(), lr=torch.tensor(1.0), layer_decay=0.5)
    assert (first["lr"].item(), last["lr"].item()) == (0.125, 1.0)
