"""VarNet and its k-space, against numpy, by hand, and the paper's parameter count."""

import numpy as np
import pytest
import torch
from plain_varnet import reconstruct
from torch import nn

from cubegrad.study.models import kspace
from cubegrad.study.models.varnet import Cascade, ComplexUNet, UNet, VarNet
from cubegrad.study.problems import fastmri

TINY = {"cascades": 2, "channels": 2, "pools": 1, "map_channels": 2, "map_pools": 1}


def random_complex(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.complex64, generator=generator)


@pytest.mark.parametrize("shape", [(8, 12), (9, 7), (6, 5)])
def test_transforms_are_numpys_centred_and_orthonormal(shape):
    images = random_complex(2, 3, *shape)
    axes = (-2, -1)
    shifted = np.fft.ifftshift(images.numpy(), axes)
    expected = np.fft.fftshift(np.fft.fft2(shifted, norm="ortho"), axes)
    found = kspace.to_kspace(images)
    assert found.dtype == torch.complex64
    np.testing.assert_allclose(found, expected, atol=2e-6)
    torch.testing.assert_close(kspace.to_images(found), images, atol=2e-6, rtol=0)


def test_a_transform_by_its_definition():
    height, width = 6, 5
    images = random_complex(height, width).to(torch.complex128)
    y, x = torch.arange(height)[:, None] - 3, torch.arange(width) - 2
    found = kspace.to_kspace(images)
    for row, column in ((0, 0), (3, 2), (5, 4), (1, 3)):
        angle = -2 * torch.pi * ((row - 3) * y / height + (column - 2) * x / width)
        wave = torch.polar(torch.ones_like(angle), angle)
        assert found[row, column] == pytest.approx(((images * wave).sum() / 30**0.5).item())


def test_the_lines_by_hand():
    def columns(*arguments):
        return kspace.measured(*arguments).nonzero()[:, 0].tolist()

    # Frequencies -6 … 5: -3, 1 and 5 are 1 more than a multiple of 4; -1 and 0 are the centre.
    assert columns(12, 2, 4, 1) == [3, 5, 6, 7, 11]
    # Frequencies -6 … 6: -3, 1, 5; the centre is -1, 0, 1.
    assert columns(13, 3, 4, 1) == [3, 5, 6, 7, 11]
    assert columns(12, 2, 4, 3) == [1, 5, 6, 9]
    assert kspace.central(368, 16).nonzero()[:, 0].tolist() == list(range(176, 192))
    # A quarter of 368 is 92; of the 16 in the centre, -7, -3, 1 and 5 are among them already.
    assert len(columns(368, 16, 4, 1)) == 92 + 16 - 4
    lattice = {column - 184 for column in columns(368, 0, 4, 1)}
    assert len(lattice) == 92
    assert not any(-frequency in lattice for frequency in lattice)


def test_root_sum_of_squares_is_numpys_and_has_a_slope_at_nothing():
    coils = random_complex(2, 3, 4, 5).requires_grad_()
    expected = np.sqrt((np.abs(coils.detach().numpy()) ** 2).sum(1))
    np.testing.assert_allclose(kspace.root_sum_of_squares(coils).detach(), expected, rtol=1e-6)
    nothing = torch.zeros(1, 3, 4, 5, dtype=torch.complex64, requires_grad=True)
    kspace.root_sum_of_squares(nothing).sum().backward()
    assert torch.equal(nothing.grad, torch.zeros_like(nothing))


def test_a_crop_is_of_the_centre():
    image = torch.arange(35).view(1, 5, 7)
    assert kspace.centre_crop(image, 3, 3).tolist() == [[[9, 10, 11], [16, 17, 18], [23, 24, 25]]]


def test_the_network_has_the_papers_parameters_and_layers():
    """The paper: 12,931,532 parameters over 273 layers."""
    options = fastmri.problem().presets["paper"].options
    with torch.device("meta"):
        model = VarNet(*options["network"])
    assert len(model.cascades) == 12
    assert sum(param.numel() for param in model.parameters()) == 12_931_532
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == 273


@pytest.mark.parametrize("name", ["cpu", "gpu", "paper"])
def test_each_preset_says_its_size(name):
    preset = fastmri.problem().presets[name]
    with torch.device("meta"):
        model = VarNet(*preset.options["network"])
    count = sum(param.numel() for param in model.parameters())
    assert f"{len(model.cascades)} cascades, {count:,} parameters" in preset.size


def test_a_unet_of_two_poolings_by_hand():
    """Weights of 3x3 at widths 4 and 8: down 2-4-4-8-8, bottom, up 16-4-4 and 8-4-4; then 1x1."""
    unet = UNet(4, 2)
    pairs = [(2, 4), (4, 4), (4, 8), (8, 8), (8, 8), (8, 8), (16, 4), (4, 4), (8, 4), (4, 4)]
    threes = sum(9 * inputs * outputs + outputs for inputs, outputs in pairs)
    ones = (4 * 2 + 2) + (2 * 2 + 2) + (2 * 2 + 2)
    assert sum(param.numel() for param in unet.parameters()) == threes + ones
    assert unet(torch.randn(1, 2, 8, 12)).shape == (1, 2, 8, 12)


class Identity(nn.Module):
    """Returns its input, and keeps it."""

    def forward(self, x):
        self.x = x
        return x


def test_images_go_in_standard_and_padded_and_come_out_as_they_were():
    network = ComplexUNet(2, 4)
    network.unet = Identity()
    images = 1e-5 * random_complex(3, 37, 50) + (3e-5 - 2e-5j)
    torch.testing.assert_close(network(images), images, rtol=1e-5, atol=1e-10)
    seen = network.unet.x
    assert seen.shape == (3, 2, 48, 64)
    inside = seen[:, :, 5:42, 7:57]  # 11 rows and 14 columns more, half of them before
    assert seen.abs().sum() == pytest.approx(inside.abs().sum().item())
    torch.testing.assert_close(inside.mean((2, 3)), torch.zeros(3, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(inside.std((2, 3)), torch.ones(3, 2))
    real = images[1].real
    expected = (real - real.mean()) / real.std()
    torch.testing.assert_close(inside[1, 0], expected, rtol=1e-4, atol=1e-4)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_cascade_is_its_formula_in_numpy():
    k, m, maps = (random_complex(2, 3, 8, 6, seed=seed) for seed in range(3))
    lines = torch.tensor([True, False, True, True, False, True])
    cascade = Cascade(2, 1)
    cascade.refine = Doubled()
    with torch.no_grad():
        cascade.strength.fill_(0.3)
        found = cascade(k, m, lines, maps)
    k, m, maps = (tensor.numpy() for tensor in (k, m, maps))
    image = 2 * (np.fft.ifft2(k) * np.conj(maps)).sum(1, keepdims=True)
    misfit = np.where(lines.numpy(), k - m, 0)
    expected = k - 0.3 * misfit - np.fft.fft2(image * maps)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


class Nothing(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def test_data_consistency_steps_down_the_misfit():
    """The term is the gradient of ½ Σ |measured (k - m)|², and strength scales the step."""
    k, m = random_complex(1, 2, 4, 4).requires_grad_(), random_complex(1, 2, 4, 4, seed=1)
    maps, weight = random_complex(1, 2, 4, 4, seed=2), random_complex(1, 2, 4, 4, seed=3)
    lines = torch.tensor([False, True, True, False])
    (0.5 * ((k - m)[..., 1:3].abs() ** 2).sum()).backward()
    cascade = Cascade(2, 1)
    cascade.refine = Nothing()
    out = cascade(k.detach(), m, lines, maps)
    torch.testing.assert_close(out, k.detach() - k.grad)
    assert torch.equal(out[..., 0], k.detach()[..., 0])
    torch.testing.assert_close(out[..., 1:3], m[..., 1:3])
    (weight.conj() * out).real.sum().backward()
    by_hand = -(weight.conj() * (k.detach() - m))[..., 1:3].real.sum()
    torch.testing.assert_close(cascade.strength.grad, by_hand.view(1))


def assert_alike(model, found, expected):
    """The images, and the gradients of a sum in which every pixel has another weight."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.arange(found.numel(), dtype=found.dtype).cos().view_as(found)
    slopes = [
        torch.autograd.grad((weights * image).sum(), list(model.parameters()))
        for image in (found, expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", [(16, 12), (15, 13), (16, 13), (9, 16)])
def test_cascades_without_shifts_are_those_with_centred_transforms(shape):
    torch.manual_seed(0)
    model = VarNet(3, 2, 1, 2, 1).double()
    with torch.no_grad():
        for cascade, strength in zip(model.cascades, (0.3, 0.7, 1.2), strict=True):
            cascade.strength.fill_(strength)
    lines = kspace.measured(shape[1], 4, 4, 1)
    some = random_complex(2, 3, *shape).to(torch.complex128) * lines
    assert_alike(model, model(some, lines, 4), reconstruct(model, some, lines, 4))


def test_all_lines_without_refinement_are_the_image_itself():
    model = VarNet(**TINY)
    for cascade in model.cascades:
        cascade.refine = Nothing()
    full = random_complex(2, 3, 8, 12)
    found = model(full, torch.ones(12, dtype=torch.bool), 4)
    expected = np.sqrt((np.abs(kspace.to_images(full).numpy()) ** 2).sum(1))
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-5)


def test_sensitivities_are_of_the_centre_and_sum_to_one():
    model = VarNet(**TINY)
    some = random_complex(2, 3, 8, 12)
    maps = model.sensitivities(some, 4)
    assert maps.shape == (2, 3, 8, 12)
    torch.testing.assert_close((maps.abs() ** 2).sum(1), torch.ones(2, 8, 12))
    other = some.clone()
    other[..., :4] += 1
    other[..., 8:] += 1
    assert torch.equal(model.sensitivities(other, 4), maps)
    other[..., 5] += 1
    assert not torch.equal(model.sensitivities(other, 4), maps)


def test_an_image_scales_with_its_kspace():
    """fastMRI's values are of the order of 1e-5; every stage is linear or normalised."""
    model = VarNet(**TINY)
    lines = kspace.measured(16, 4, 4, 1)
    some = random_complex(1, 3, 16, 16) * lines
    torch.testing.assert_close(
        1e5 * model(1e-5 * some, lines, 4), model(some, lines, 4), rtol=1e-3, atol=1e-4
    )


def test_bfloat16_is_near_and_only_inside():
    torch.manual_seed(0)
    plain, mixed = VarNet(**TINY), VarNet(**TINY, mixed=True)
    mixed.load_state_dict(plain.state_dict())
    lines = kspace.measured(16, 4, 4, 1)
    some = random_complex(2, 3, 16, 16) * lines
    expected, found = plain(some, lines, 4), mixed(some, lines, 4)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()
    found.sum().backward()
    assert all(param.grad.isfinite().all() for param in mixed.parameters())
