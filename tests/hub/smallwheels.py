"""Small wheels that tests make, in place of the package index."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str = "1.0", *, padding: int = 0) -> Path:
    """Write a pure Python package of one module with a ``version``; ``padding`` makes it so many bytes larger."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    about = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": f"version = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{module}_padding.txt": " " * padding} if padding else {}),
    }
    with zipfile.ZipFile(path, "w") as file:
        for each, text in {**files, f"{about}/RECORD": "".join(f"{f},,\n" for f in files)}.items():
            file.writestr(each, text)
    return path
