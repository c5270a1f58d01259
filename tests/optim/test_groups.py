"""cubegrad.param_groups: the groups of real models, and the options that they get."""

import pytest
import torch
from group_models import ResNet, llama, names, options
from torch import nn
from torch.nn.utils import parametrizations

from cubegrad import MADGRAD, param_groups


def spared(model, **chosen):
    return names(model, param_groups(model, **chosen)).get("no_decay", [])


class RMSNorm(nn.Module):  # as many models have their own
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))


class Mixed(nn.Module):
    """Parameters that are known by their names and shapes only, and a head that is tied."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.temperature = nn.Parameter(torch.ones(()))
        self.gamma = nn.Parameter(torch.ones(8))
        self.kernel = nn.Parameter(torch.zeros(8, 8))
        self.relative_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.head = nn.Linear(8, 20, bias=False)
        self.norm = RMSNorm()
        self.act = nn.PReLU()
        self.factors = nn.ParameterList([torch.ones(8, 8), torch.ones(8)])
        self.table_emb = nn.ParameterDict({"a": torch.ones(8, 8)})
        self.embed = nn.Embedding(20, 8)
        self.head.weight = self.embed.weight


def test_a_transformer_encoder():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
    )
    weights = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"]
    weights.append("linear2.weight")
    vectors = ["self_attn.in_proj_bias", "self_attn.out_proj.bias", "linear1.bias", "linear2.bias"]
    vectors += ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
    groups = param_groups(model, weight_decay=0.1)
    assert names(model, groups) == {
        "decay": [f"layers.{i}.{name}" for i in (0, 1) for name in weights],
        "no_decay": [f"layers.{i}.{name}" for i in (0, 1) for name in vectors],
    }
    assert options(groups) == {"decay": {"weight_decay": 0.1}, "no_decay": {"weight_decay": 0.0}}


def test_a_residual_net_by_depth():
    model = ResNet()
    groups = param_groups(model, lr=1.0, weight_decay=1e-4, layer_decay=0.5)
    block = ["conv1.weight", "downsample.0.weight"]
    norms = ["bn1.weight", "bn1.bias", "downsample.1.weight", "downsample.1.bias"]
    assert names(model, groups) == {
        "depth_0/decay": ["conv1.weight"],
        "depth_0/no_decay": ["bn1.weight", "bn1.bias"],
        "depth_1/decay": [f"layer1.0.{name}" for name in block],
        "depth_1/no_decay": [f"layer1.0.{name}" for name in norms],
        "depth_2/decay": [f"layer2.0.{name}" for name in block],
        "depth_2/no_decay": [f"layer2.0.{name}" for name in norms],
        "depth_3/decay": ["fc.weight"],
        "depth_3/no_decay": ["fc.bias"],
    }
    assert [group["lr"] for group in groups] == [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    model = llama(tie_word_embeddings=tied)
    found = names(model, param_groups(model, lr="auto", weight_decay=0.1, layer_decay=0.5))
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    weights = attention + [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {"depth_0/no_decay": ["model.embed_tokens.weight"]}
    for i in (0, 1):
        expected[f"depth_{i + 1}/decay"] = [f"model.layers.{i}.{name}" for name in weights]
        expected[f"depth_{i + 1}/no_decay"] = [f"model.layers.{i}.{name}" for name in norms]
    expected |= {} if tied else {"depth_3/decay": ["lm_head.weight"]}
    assert found == expected | {"depth_3/no_decay": ["model.norm.weight"]}


def test_bert_and_vit():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    sizes["num_hidden_layers"] = 1
    config = transformers.BertConfig(**sizes, vocab_size=20)
    model = transformers.BertForSequenceClassification(config)
    found = names(model, param_groups(model, lr=1.0, layer_decay=0.5))
    tables = [f"{name}_embeddings.weight" for name in ("word", "position", "token_type")]
    start = [*tables, "LayerNorm.weight", "LayerNorm.bias"]
    assert found["depth_0/no_decay"] == [f"bert.embeddings.{name}" for name in start]
    assert found["depth_2/decay"] == ["bert.pooler.dense.weight", "classifier.weight"]
    assert found["depth_2/no_decay"] == ["bert.pooler.dense.bias", "classifier.bias"]
    assert [len(found[f"depth_1/{decay}"]) for decay in ("decay", "no_decay")] == [6, 10]
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    model = transformers.ViTForImageClassification(config)
    found = names(model, param_groups(model, lr=1.0, layer_decay=0.5))
    start = ["cls_token", "position_embeddings", "patch_embeddings.projection.bias"]
    assert found["depth_0/no_decay"] == [f"vit.embeddings.{name}" for name in start]
    assert found["depth_0/decay"] == ["vit.embeddings.patch_embeddings.projection.weight"]
    assert found["depth_2/decay"] == ["classifier.weight"]


def test_kinds_that_names_and_shapes_tell():
    model = Mixed()
    norms, biases = ["norm.scale"], ["relative_bias_table"]
    embeddings = ["cls_token", "head.weight", "table_emb.a"]
    scales = ["temperature", "gamma", "act.weight", "factors.1"]
    for kind, own in {
        "norms": norms,
        "biases": biases,
        "embeddings": embeddings,
        "scales": scales,
    }.items():
        assert sorted(spared(model, no_decay=(kind,))) == sorted(own)
    assert names(model, param_groups(model))["decay"] == ["kernel", "factors.0"]
    assert spared(model, no_decay=()) == []


def test_recurrent_nets_attention_and_weight_norm():
    assert spared(nn.LSTM(2, 2)) == ["bias_ih_l0", "bias_hh_l0"]
    attention = nn.MultiheadAttention(4, 2, kdim=2, add_bias_kv=True)
    assert spared(attention) == ["in_proj_bias", "bias_k", "bias_v", "out_proj.bias"]
    parametrized = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 1)),
    )
    magnitude = "0.parametrizations.weight.original0"
    assert sorted(spared(parametrized)) == ["0.bias", magnitude, "1.bias"]


# Options


def test_what_is_not_given_is_the_optimizers():
    groups = param_groups(ResNet())
    assert options(groups) == {"decay": {}, "no_decay": {"weight_decay": 0.0}}
    optimizer = MADGRAD(groups, lr=0.5, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert options(param_groups(ResNet(), weight_decay=0)) == {"no_decay": {"weight_decay": 0.0}}


def test_later_patterns_override_earlier_ones_and_the_rest():
    model = ResNet()
    patterns = {
        "layer1": {"lr": 0.5, "momentum": 0.5},
        "*.bias": {"weight_decay": 0.3},
        "layer1.0.bn?.bias": {"lr": 0.25},
        "f?": {"weight_decay": 0.0, "lr": 2.0},
    }
    groups = param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5, patterns=patterns)
    found, given = names(model, groups), options(groups)
    assert found["layer1/*.bias/layer1.0.bn?.bias"] == ["layer1.0.bn1.bias"]
    everything = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.3}
    assert given["layer1/*.bias/layer1.0.bn?.bias"] == everything
    assert given["decay/layer1"] == {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.1}
    assert given["depth_0/*.bias"] == {"lr": 0.125, "weight_decay": 0.3}
    assert (found["f?"], given["f?"]) == (["fc.weight"], {"lr": 2.0, "weight_decay": 0.0})
    assert given["*.bias/f?"] == given["f?"]
    everyone = [name for group in found.values() for name in group]
    assert sorted(everyone) == sorted(name for name, _ in model.named_parameters())


def test_a_pattern_may_match_frozen_parameters_only():
    model = ResNet()
    model.fc.requires_grad_(False)
    groups = param_groups(model, patterns={"fc": {"lr": 1.0}})
    assert {id(p) for g in groups for p in g["params"]}.isdisjoint(map(id, model.fc.parameters()))


def test_a_head_before_the_blocks_and_lists_of_embeddings_and_heads():
    model = nn.Module()
    model.head = nn.Linear(2, 2, bias=False)
    model.embeddings = nn.ModuleList([nn.Embedding(2, 2), nn.Embedding(2, 2)])
    model.encoder_layer_0 = nn.Linear(2, 2, bias=False)
    model.between = nn.Linear(2, 2, bias=False)
    model.encoder_layer_1 = nn.Linear(2, 2, bias=False)
    model.positions = nn.Embedding(2, 2)
    model.layernorm_embedding = nn.LayerNorm(2, bias=False)
    model.embed_out = nn.Linear(2, 2, bias=False)
    model.heads = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    found = names(model, param_groups(model, lr=1.0, layer_decay=0.5, no_decay=()))
    tables = ["embeddings.0.weight", "embeddings.1.weight", "positions.weight"]
    tables.append("layernorm_embedding.weight")
    assert found == {
        "depth_0/decay": tables,
        "depth_1/decay": ["encoder_layer_0.weight", "between.weight"],
        "depth_2/decay": ["encoder_layer_1.weight"],
        "depth_3/decay": ["head.weight", "embed_out.weight", "heads.0.weight"],
    }
