"""Random crops, by hand and by their distribution; resampling as Pillow does it."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from small_images import photo

from cubegrad.study.data import crops

BILINEAR = Image.Resampling.BILINEAR


def draw(areas=(), ratios=(), left=0.0, top=0.0, mirror=0.9):
    """A row of uniform numbers; tries that are not given take the whole area at ratio 1."""
    row = np.zeros((1, crops.DRAWS))
    row[0, :10] = [*areas, *[1.0] * (10 - len(areas))]
    row[0, 10:20] = [*ratios, *[0.5] * (10 - len(ratios))]
    row[0, 20:23] = left, top, mirror
    return row


def box(size, row):
    boxes, mirrored = crops.random_boxes(np.array([size]), row)
    return boxes[0].tolist(), bool(mirrored[0])


def test_a_crop_by_hand():
    # 0.08 + 0.92 * 0.5 = 0.54 of 8,000 pixels are 4,320, whose root is 65.7
    assert box((100, 80), draw([0.5], [0.5])) == ([0, 0, 66, 66], False)
    # places 0 to 34 across and 0 to 14 down
    assert box((100, 80), draw([0.5], [0.5], 0.999, 0.999)) == ([34, 14, 66, 66], False)
    assert box((100, 80), draw([0.5], [0.5], 0.5, 0.5, mirror=0.4)) == ([17, 7, 66, 66], True)
    # the least area, 640, at the ratios' ends: √(640 * 4/3) = 29.2 and √(640 * 3/4) = 21.9
    assert box((100, 80), draw([0.0], [1.0]))[0] == [0, 0, 29, 22]
    assert box((100, 80), draw([0.0], [0.0]))[0] == [0, 0, 22, 29]


def test_the_first_try_within_the_image_counts():
    # the whole area as a square, 89 x 89, is higher than the image
    assert box((100, 80), draw([1.0, 0.5], [0.5, 0.5]))[0] == [0, 0, 66, 66]
    assert box((100, 80), draw([1.0, 0.0, 0.5], [0.5, 1.0, 0.5]))[0] == [0, 0, 29, 22]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1000, 10), [493, 0, 13, 10]),  # 10 * 4/3 wide, in the middle
        ((10, 1000), [0, 493, 10, 13]),
        ((100, 80), [0, 0, 100, 80]),  # an allowed ratio: the whole image
    ],
)
def test_where_no_try_fits_the_middle_is_taken(size, expected):
    assert box(size, draw())[0] == expected


def test_areas_ratios_and_places_are_spread_as_they_should_be():
    count = 20_000
    sizes = np.tile([[500, 400]], (count, 1))
    boxes, mirrored = crops.random_boxes(sizes, crops.draws(3, 5, 0, count))
    left, top, width, height = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= 500).all()
    assert (top + height <= 400).all()
    share = width * height / 200_000
    assert 0.079 < share.min() < 0.085
    assert share.max() > 0.95
    # Up to 0.6 of the area any ratio fits, so no try is rejected and areas are uniform.
    low = share[share < 0.6]
    assert abs(low.mean() - 0.34) < 5 * 0.15 / math.sqrt(len(low))
    ratios = np.log((width / height)[share < 0.6])
    assert abs(ratios.mean()) < 0.01
    assert ratios.std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), rel=0.03)
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / math.sqrt(count)
    small = share < 0.3
    where = left[small] / (500 - width[small])
    assert abs(where.mean() - 0.5) < 5 * 0.3 / math.sqrt(small.sum())


def test_an_images_numbers_do_not_depend_on_who_else_is_drawn():
    whole = crops.draws(7, 2, 0, 50)
    for index in (0, 1, 31, 49):
        assert np.array_equal(crops.draws(7, 2, index, 1)[0], whole[index])
    assert np.array_equal(crops.draws(7, 2, 10, 20), whole[10:30])
    for other in (crops.draws(8, 2, 0, 50), crops.draws(7, 3, 0, 50), crops.draws(2, 7, 0, 50)):
        assert not (other == whole).any()
    assert crops.draws(7, 2, 1_300_000_000, 1).shape == (1, crops.DRAWS)


def test_sizes_of_the_test_crop_by_hand():
    sizes = np.array([(500, 375), (375, 500), (32, 32)])
    assert crops.resized(sizes[:2], 256).tolist() == [[341, 256], [256, 341]]  # 341.3
    assert crops.resized(sizes[2:], 73).tolist() == [[73, 73]]
    middles = crops.middles(np.array([(341, 256), (256, 256)]), 224)
    assert middles.tolist() == [[58, 16], [16, 16]]  # 58.5 is rounded to even
    boxes = crops.middle_boxes(np.array([[512, 512], [512, 1024]]), 256, 224)
    assert boxes.tolist() == [[32, 32, 448, 448], [32, 288, 448, 448]]


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def rows(*values):
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("where", [(3, 5, 30, 20), (0, 0, 60, 45), (50, 40, 2, 1), (10, 0, 16, 45)])
def test_a_crop_is_resampled_as_pillow_does(where, mirror):
    """Enlarged, shrunk and mixed; Pillow rounds to bytes after each axis."""
    image = photo((60, 45))
    left, top, width, height = where
    cut = image.crop((left, top, left + width, top + height)).resize((16, 16), BILINEAR)
    expected = as_tensor(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else cut)
    found = crops.resample(as_tensor(image), rows(*where), rows(*where), torch.tensor([mirror]), 16)
    assert found.shape == (1, 3, 16, 16)
    assert (found - expected).abs().max() <= 1.01


@pytest.mark.parametrize("size", [(60, 45), (45, 60), (20, 20), (100, 33)])
def test_the_middle_is_resampled_as_pillow_does(size):
    image = photo(size)
    shorter = min(size)
    width, height = (37 * length // shorter for length in size)
    left, top = round((width - 32) / 2), round((height - 32) / 2)
    expected = image.resize((width, height), BILINEAR).crop((left, top, left + 32, top + 32))
    boxes = torch.from_numpy(crops.middle_boxes(np.array([size]), 37, 32)).float()
    stored = torch.zeros(
        1, 3, 110, 120, dtype=torch.uint8
    )  # pixels outside the image are never read
    stored[:] = 255
    stored[:, :, : size[1], : size[0]] = as_tensor(image)
    bounds, mirrored = rows(0, 0, *size), torch.tensor([False])
    found = crops.resample(stored, boxes, bounds, mirrored, 32)
    assert (found - as_tensor(expected)).abs().max() <= 1.01
