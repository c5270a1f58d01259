"""The paper's networks, as plain `nn.Module`s, where no well-kept library has them."""
