"""A data set with an error, in a module that a worker of a DataLoader can import."""

import torch


class Items(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        try:
            return [0][index + 1]
        except IndexError:
            return missing_name  # type: ignore[name-defined,no-any-return]  # noqa: F821
