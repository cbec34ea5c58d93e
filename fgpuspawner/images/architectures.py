"""Which GPU models an image has code for, as far as that is known. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fgpuspawner.images.model import Image

CAPABILITIES = {
    r"RTX 50\d\d.*|RTX PRO \d+ Blackwell.*": "12.0",
    "B300|GB300": "10.3",
    "B200|B100|GB200": "10.0",
    "H100|H200|H20|H800|GH200": "9.0",
    r"L4|L40S?|RTX 40\d\d.*|RTX \d000 Ada.*": "8.9",
    r"A2|A10G?|A16|A40|RTX A\d\d\d\d|RTX 30\d\d.*": "8.6",
    "A100|A30|A800": "8.0",
    r"T4G?|RTX 20\d\d.*|Quadro RTX \d000|TITAN RTX|GTX 16\d\d.*": "7.5",
    "V100|TITAN V": "7.0",
    r"P4|P40|GTX 10\d\d.*|TITAN Xp?": "6.1",
    "P100": "6.0",
    "M4|M40|M60": "5.2",
    "K80": "3.7",
    "K40": "3.5",
}
"""The compute capability by the name that the driver gives a model, without maker and memory (NVIDIA's own list)."""


def capability_of(model: str) -> str | None:
    """Return a GPU model's compute capability such as "8.0"; None where it is not known."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", model)
    for names, capability in CAPABILITIES.items():
        # "A100-SXM4-40GB" and "H100 80GB HBM3" are what "A100" and "H100" come as.
        if re.fullmatch(rf"(?:{names})(?:[- ](?:SXM|PCIE|NVL|HBM|\d+ ?GB).*)?", name, re.IGNORECASE):
            return capability
    return None


def runs_on(image: Image, model: str) -> bool:
    """Return False where the image is known to have no code for this model of GPU."""
    capability = capability_of(model)
    if capability is None or not image.gpu_architectures:
        return True
    # Code for 8.0 runs on 8.6, and not the other way round, nor on another major version.
    major, minor = (int(part) for part in capability.split("."))
    listed = [tuple(int(part) for part in one.split(".")) for one in image.gpu_architectures]
    return any(one == major and least <= minor for one, least in listed)


def models_for(image: Image, models: Sequence[str]) -> tuple[str, ...]:
    """Return those of the models that the image may run on."""
    return tuple(model for model in models if runs_on(image, model))
