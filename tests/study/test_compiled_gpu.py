"""What a GPU's compiler makes of the problems at the size of their preset: the same gradients.

Torch 2.11 compiles some backward passes into kernels that store numbers and read them back in other
threads, without a barrier (pytorch/pytorch#190519). Whether a network is hit depends on its sizes:
the U-Nets of the MR images were, and are not compiled any more.
"""

import copy

import pytest
import torch
from small_runs import needs_gpu

from cubegrad.study.data.masking import masked
from cubegrad.study.data.tokens import BEGIN, SPECIAL
from cubegrad.study.graphs import compiled
from cubegrad.study.models.preact import PreActResNet
from cubegrad.study.models.resnet import ResNet, Stem
from cubegrad.study.problems import bookwiki, cifar10, imagenet

# The compiler warns of its own code.
pytestmark = [needs_gpu, pytest.mark.filterwarnings("default")]


def images(count, side):
    return torch.randint(256, (count, side, side, 3), dtype=torch.uint8)


def of_cifar10(options, batch):
    model = PreActResNet(options["stages"], options["bottleneck"], options["width"])
    example = (images(batch, cifar10.SIDE), torch.randint(10, (batch,)))
    return model.to(memory_format=torch.channels_last), cifar10.mean_loss, example


def of_imagenet(options, batch):
    stem, stages = Stem(*options["stem"]), options["stages"]
    model = ResNet(stages, options["width"], 50, stem, options["bottleneck"])
    normal = imagenet.normalised(images(batch, options["side"]).permute(0, 3, 1, 2))
    example = (normal, torch.randint(50, (batch,)))
    return model.to(memory_format=torch.channels_last), imagenet.loss_of_normalised, example


def of_bookwiki(options, batch):
    vocabulary, length = options["vocabulary"], options["length"]
    rows = torch.randint(SPECIAL, vocabulary, (batch, length))
    rows[:, 0] = BEGIN
    model = bookwiki.network({**options, "dropout": 0.0}, vocabulary)
    return model, bookwiki.mean_loss, masked(rows, vocabulary, None)


PROBLEMS = {
    cifar10: of_cifar10,
    imagenet: of_imagenet,
    bookwiki: of_bookwiki,
}


def gradients(model, loss, example, device):
    model = copy.deepcopy(model).to(device)
    loss(model, *(tensor.to(device) for tensor in example)).backward()
    named = model.named_parameters()
    return {name: param.grad.cpu() for name, param in named if param.dim() > 1}


def assert_compiled_is_as_good(model, loss, example):
    """Each weight's gradient, compiled, is about as near to the exact one as without compiling.

    It is also the same each time. With the race in the U-Nets of the MR images, seven repetitions
    of eight differed from the first gradient by 0.02 to 1.3 of its size; in float32, where there
    was none, by at most 0.0007 (H200).
    """
    exact = gradients(model, loss, example, "cpu")  # where nothing is in bfloat16
    plain = gradients(model, loss, example, "cuda")
    first = gradients(model, compiled(loss), example, "cuda")
    for name, right in exact.items():
        error, usual = ((some[name] - right).norm() for some in (first, plain))
        assert error <= 2 * usual + 0.02 * right.norm(), name
    for _ in range(10):  # a race need not show each time
        again = gradients(model, compiled(loss), example, "cuda")
        for name, one in first.items():
            assert (again[name] - one).norm() <= 0.01 * one.norm(), name


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.__name__.split(".")[-1])
def test_compiled_gradients_of_a_problem(problem):
    if problem is bookwiki:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    preset = problem.problem().presets["gpu"]
    assert_compiled_is_as_good(*PROBLEMS[problem](dict(preset.options), preset.batch))
