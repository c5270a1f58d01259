"""The paper's networks that no maintained library has, as plain `nn.Module`s."""
