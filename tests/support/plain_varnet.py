"""VarNet as its formulas say it, with centred transforms everywhere, over a model's own U-Nets."""

from cubegrad.study.models import kspace


def reconstruct(model, measurement, lines, low):
    """What `model(measurement, lines, low)` must return."""
    centre = kspace.central(measurement.shape[-1], low)
    rough = kspace.to_images(measurement * centre)
    maps = model.maps(rough.flatten(0, 1)).view_as(rough)
    maps = maps / kspace.root_sum_of_squares(maps)[:, None]
    k = measurement
    for cascade in model.cascades:
        image = (kspace.to_images(k) * maps.conj()).sum(1)
        correction = kspace.to_kspace(cascade.refine(image)[:, None] * maps)
        k = k - cascade.strength * (k - measurement) * lines - correction
    return kspace.root_sum_of_squares(kspace.to_images(k))
