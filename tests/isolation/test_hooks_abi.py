"""isolation/include agrees with NVIDIA's own: cuda.h, and nvidia-ml-py."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from sessionfolders import ISOLATION, MakePath

CUDA_ABI = ISOLATION / "include" / "cuda_abi.h"
NVML_ABI = ISOLATION / "include" / "nvml_abi.h"


def cuda_include() -> Path:
    """Return the folder of cuda.h, or skip."""
    folder = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "include")
    if not (folder / "cuda.h").is_file():
        pytest.skip("no cuda.h: pip install '.[test-clients]'")
    return folder


def text_of(header: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)


def functions(header: Path) -> list[str]:
    return re.findall(r"^(?:CUresult|nvmlReturn_t|const char \*) ?(\w+)\(", text_of(header), flags=re.M)


def enumerators(header: Path) -> list[str]:
    bodies = re.findall(r"typedef enum \{(.*?)\}", text_of(header), flags=re.S)
    return [name for body in bodies for name in re.findall(r"(\w+) =", body)]


def members(body: str, prefix: str = "") -> Iterator[str]:
    """Yield the members of a structure's body, those of structures within it by their path."""
    statement, depth = "", 0
    for character in body:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character != ";" or depth > 0:
            statement += character
            continue
        inner = re.match(r"\s*(?:struct|union) \{(.*)\}\s*(\w*)\s*$", statement, flags=re.S)
        if inner:
            name = prefix + inner[2]
            if inner[2]:
                yield name
            yield from members(inner[1], f"{name}." if inner[2] else prefix)
        else:
            for declarator in statement.split(","):
                yield prefix + re.findall(r"(\w+)(?:\[\w+\])?\s*$", declarator)[0]
        statement = ""


def structures(header: Path) -> dict[str, list[str]]:
    found = re.findall(r"typedef (?:struct|union) \{\n(.*?)\n\} (\w+);", text_of(header), flags=re.S)
    return {name: list(members(body)) for body, name in found}


def layout_program(header: Path, include: str) -> str:
    """Return a C program that prints each value, size and offset that the header fixes, a line each."""
    lines = [f'printf("{name} %lld\\n", (long long){name});' for name in enumerators(header)]
    for name, its_members in structures(header).items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'printf("{name}.{member} %zu %zu\\n", offsetof({name}, {member}), sizeof((({name} *)0)->{member}));'
            for member in its_members
        ]
    return "\n".join(
        ["#include <stddef.h>", "#include <stdio.h>", include, "int main(void) {", *lines, "return 0; }", ""]
    )


def layout(program: Path) -> list[str]:
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def compiled(tmp_path: Path, compile_c: MakePath) -> MakePath:
    def compiled(name: str, source: str, *flags: str) -> Path:
        path = tmp_path / name
        path.write_text(source)
        return compile_c(path, *flags)

    return compiled


def test_the_parser_of_this_test_finds_what_the_headers_declare() -> None:
    assert {"cuInit", "cuMemAlloc_v2", "cuGraphLaunch_ptsz"} <= set(functions(CUDA_ABI))
    assert {"nvmlInit_v2", "nvmlErrorString"} <= set(functions(NVML_ABI))
    assert {"CUDA_ERROR_OUT_OF_MEMORY", "CU_AD_FORMAT_P010"} <= set(enumerators(CUDA_ABI))
    assert "allocFlags.usage" in structures(CUDA_ABI)["CUmemAllocationProp"]
    assert {"gridDimX", "gridDimY", "numAttrs"} <= set(structures(CUDA_ABI)["CUlaunchConfig"])


def test_each_function_has_the_type_that_cuda_h_gives_it(tmp_path: Path) -> None:
    includes = [f"-I{CUDA_ABI.parent}", f"-I{cuda_include()}"]
    command = ["gcc", "-std=c11", "-Werror", "-c", "-o", os.devnull, *includes]
    source = str(ISOLATION / "tests" / "abi_cuda.c")
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Declared twice is declared by both: the compiler says so of each function that cuda.h has.
    twice = subprocess.run(
        [*command, "-Wno-error", "-Wredundant-decls", source], capture_output=True, text=True, check=False
    ).stderr
    declared = set(re.findall(r"redundant redeclaration of .(cu\w+)", twice))
    elsewhere = {f"cu{display}CtxCreate{version}" for display in ("GL", "VDPAU") for version in ("", "_v2")}
    assert set(functions(CUDA_ABI)) - declared == elsewhere


def test_each_value_and_layout_is_that_of_cuda_h(compiled: MakePath) -> None:
    include = cuda_include()
    own = layout(compiled("own.c", layout_program(CUDA_ABI, '#include "cuda_abi.h"')))
    theirs = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>"
    nvidias = layout(compiled("nvidia.c", layout_program(CUDA_ABI, theirs), f"-isystem{include}"))
    # NVIDIA makes fields of what is reserved: how large the whole is says enough.
    used = re.compile(r"\w+(\.(?!_|reserved)\w+)* ")
    assert list(filter(used.match, own)) == list(filter(used.match, nvidias))
    assert len(own) > 300


def test_each_value_and_structure_of_nvml_is_that_of_nvidia_ml_py(compiled: MakePath) -> None:
    program = compiled("nvml.c", layout_program(NVML_ABI, '#include "nvml_abi.h"'))
    own = dict(line.split(" ", 1) for line in layout(program))
    for name in structures(NVML_ABI):
        theirs = getattr(pynvml, f"c_{name}", None) or getattr(pynvml, name, None)
        if name == "nvmlProcessInfo_v1_t":  # nvidia-ml-py no longer has the one of CUDA 10
            assert own[name] == "16"
            continue
        assert issubclass(theirs, ctypes.Structure), name
        assert own[name] == str(ctypes.sizeof(theirs)), name
        for field in theirs._fields_:
            place = getattr(theirs, field[0])
            assert own[f"{name}.{field[0]}"] == f"{place.offset} {place.size}", (name, field[0])
    for name in enumerators(NVML_ABI):
        assert own[name] == str(getattr(pynvml, name)), name


def test_each_version_of_a_structure_of_nvml_is_that_of_nvidia_ml_py(compiled: MakePath) -> None:
    theirs = {
        "nvmlMemory_v2": pynvml.nvmlMemory_v2,
        "nvmlProcessDetailList_v1": pynvml.nvmlProcessDetailList_v1,
        "nvmlProcessesUtilizationInfo_v1": pynvml.ProcessesUtilizationInfo_v1,
    }
    lines = "".join(f'printf("{name} %u\\n", {name});\n' for name in theirs)
    source = f'#include <stdio.h>\n#include "nvml_abi.h"\nint main(void) {{\n{lines}return 0; }}\n'
    assert layout(compiled("versions.c", source)) == [f"{name} {value}" for name, value in theirs.items()]
