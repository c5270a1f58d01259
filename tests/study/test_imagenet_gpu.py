"""ImageNet on a GPU: its crops, its runs, and an epoch without synchronisation."""

import cases
import numpy as np
import pytest
import torch
from small_images import small_problem, write_images
from small_runs import needs_gpu, settings_of, setup_of

from cubegrad.study.data import crops, decoding
from cubegrad.study.problems import imagenet
from cubegrad.study.train import Place, run

pytestmark = needs_gpu
WAYS = [{"longest": None}, {"longest": 64}]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


def test_crops_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (20, 3, 40, 50), generator=generator, dtype=torch.uint8)
    boxes, mirrored = crops.random_boxes(np.tile([[50, 40]], (20, 1)), crops.draws(0, 0, 0, 20))
    there = torch.from_numpy(boxes).float(), torch.from_numpy(mirrored)
    expected = crops.resample(pixels, there[0], *there, 16)
    box, mirror = (value.cuda() for value in there)
    found = crops.resample(pixels.cuda(), box, box, mirror, 16)
    assert torch.allclose(found.cpu(), expected, atol=0.01)


@pytest.mark.parametrize("options", WAYS)
def test_a_run_learns(images, monkeypatch, options):
    for module in (decoding, imagenet):
        monkeypatch.setattr(module, "worker_count", lambda _: 1)
    problem = small_problem(**options)
    record = run(problem, settings_of(problem, epochs=6, device="cuda"), Place(images))
    assert record.status == "finished"
    assert record.curve["accuracy"][-1] > 70


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_code_has_the_same_loss_and_gradients(images):
    tasks = [
        imagenet.build(setup_of(problem, images, device=torch.device("cuda")))
        for problem in (small_problem(longest=64), small_problem(longest=64, compile=True))
    ]
    tasks[1].model.load_state_dict(tasks[0].model.state_dict())
    batch = next(tasks[0].batches(0))
    still = [torch.optim.SGD(task.model.parameters(), lr=0.0) for task in tasks]
    losses = [task.step(one, batch) for task, one in zip(tasks, still, strict=True)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.02)  # in bfloat16
    grads = [torch.cat([p.grad.flatten() for p in task.model.parameters()]) for task in tasks]
    assert torch.cosine_similarity(*grads, dim=0) > 0.99


@pytest.mark.parametrize("options", WAYS)
def test_the_host_does_not_wait_within_an_epoch(images, options):
    problem = small_problem(**options)
    task = imagenet.build(setup_of(problem, images, device=torch.device("cuda")))
    batches = task.batches(0)
    total = task.loss(task.model, next(batches)).detach()
    with cases.no_waiting():
        for batch in batches:
            loss = task.loss(task.model, batch)
            loss.backward()
            total += loss.detach()
    assert total.isfinite().item()
