"""MADGRAD in a plain PyTorch loop: mixed precision, a schedule, clipping, checkpoints.

    python examples/plain_pytorch.py

Stop it at any time and start it again: it goes on after the last complete epoch. On a CPU it ends
with the same weights, bit for bit, as a run that was never stopped.
"""

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from cubegrad import MADGRAD


def main(checkpoint: Path = Path("out/plain_pytorch.pt"), epochs: int = 8) -> nn.Module:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    points = torch.randn(1024, 2, device=device)
    labels = (points.norm(dim=1) > 1.2).long()  # inside or outside a circle
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
    optimizer = MADGRAD(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(loader))
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        done = saved["epochs"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(done, epochs):
        torch.manual_seed(epoch)  # a resumed run has the batches and the dropout of an unbroken one
        for inputs, targets in loader:
            with torch.autocast(device, dtype):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # before clipping
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"epochs": epoch + 1, **states}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)  # never half written
    accuracy = (model.eval()(points).argmax(1) == labels).float().mean().item()
    print(f"{done} epochs from the checkpoint, {epochs - done} trained: accuracy {accuracy:.1%}")
    return model


if __name__ == "__main__":
    main()
