"""One call of every phase of an artifact at small sizes, to be run under a sanitizer.

python -m gauntlet.sanitized FILE DEVICE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gauntlet import inputs
from gauntlet.judge import settle
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.manifest import unpack


def main(path: str, device: str) -> None:
    """Every plan and variant that small sizes reach."""
    subject = Subject(unpack(Path(path).read_bytes()), settle(device))
    subject.hurry = True
    for dims in subject.regions:
        recipe = Recipe("sanitizer", dims, cotangent="normal")
        values = inputs.values(subject, recipe)
        subject.infer(values)
        wanted = subject.launch.interface.differentiable
        if wanted:
            _, saved = subject.forward(values)
            subject.backward(saved, inputs.cotangents(subject, recipe), dims, wanted)
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
