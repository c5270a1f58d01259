"""The Triton backend: one launch for all tensors of a group on a GPU."""
