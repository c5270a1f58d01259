"""Check that steps in a forked child or a data loader's worker equal those of this process."""

import os
import sys

import cases
import torch

import cubegrad


def prepared(threads):
    """An optimizer after a step, with enough elements for several threads."""
    torch.set_num_threads(threads)
    sizes = (200_000, 3, 70_001)
    params = [torch.nn.Parameter(cases.randn((n,), torch.float32, n)) for n in sizes]
    optimizer = cubegrad.MADGRAD(params, fused=True)
    for param in params:
        param.grad = cases.randn(param.shape, torch.float32, 1)
    optimizer.step()
    return optimizer


def stepped(optimizer):
    for _ in range(3):
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in optimizer.param_groups[0]["params"])


class Trains(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return stepped(prepared(torch.get_num_threads()))


def in_a_fork(expected):
    """The threads that torch has started stay in the parent process."""
    optimizer = prepared(2)
    child = os.fork()
    if child == 0:
        os._exit(0 if stepped(optimizer) == expected else 3)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def in_a_loader(expected):
    loader = torch.utils.data.DataLoader(Trains(), num_workers=2, batch_size=None)
    return list(loader) == [expected, expected]


if __name__ == "__main__":
    check = {"a forked child": in_a_fork, "a data loader": in_a_loader}[sys.argv[1]]
    same = check(stepped(prepared(2)))
    sys.stdout.write("the same bits\n" if same else "other bits\n")
