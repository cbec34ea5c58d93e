"""The address-equality test: what cuGetProcAddress gives is always an exported function of the real driver."""

from __future__ import annotations

import re
from collections.abc import Callable

from slices import ROOT, Slice

ASK = """
    import ctypes, struct, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if line.count("/")]
    path = next(words[-1] for words in mapped if "/libcuda.so" in words[-1])
    ours = [tuple(int(end, 16) for end in w[0].split("-")) for w in mapped if w[-1].endswith("/libfgpu.so")]
    with open(path, "rb") as file:
        image = file.read()
    (headers,), (size, count) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, headers + n * size) for n in range(count)]
    symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    names, exported = sections[symbols[6]][4], set()
    for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", image[symbols[4] : symbols[4] + symbols[5]]):
        if section and info & 15 in (2, 10):  # defined, a function
            exported.add(image[names + name : image.index(b"\\0", names + name)].decode())
    exported = {name for name in exported if name[:2] == "cu" and name[2:3].isupper()}
    def base(name):
        for ending in ("_ptsz", "_ptds", "_v2", "_v3", "_v4"):
            name = name.removesuffix(ending)
        return name
    known = {ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in exported}
    hooked = {base(name) for name in sys.argv[1].split()}
    address, status, checked = ctypes.c_void_p(), ctypes.c_int(), 0
    for name in sorted({base(name) for name in exported}):
        for version in (11000, 11030, 12000, 12020, 12050, 12080, 13000, 13020, 13040):
            for flag in (0, 1, 2):
                words = (name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flag), ctypes.byref(status))
                if cuda.cuGetProcAddress_v2(*words) != 0 or not address.value:
                    continue
                if ours and name in hooked:
                    checked += 1
                    if not any(start <= address.value < end for start, end in ours):
                        print("not hooked:", name, version, flag)
                elif not ours:
                    checked += 1
                    if address.value not in known:
                        print("not exported:", name, version, flag)
    print(checked)
"""
"""Without libfgpu every answer must be an exported address; with it every answer for a hooked function one of ours."""


def hooked() -> str:
    table = (ROOT / "isolation" / "libfgpu" / "hooks.h").read_text()
    return " ".join(re.findall(r"HOOK\(CUDA, (\w+)", table))


def test_each_answer_of_the_driver_is_one_of_its_exported_functions(slice_of: Callable[..., Slice]) -> None:
    *missed, checked = slice_of(4096).run(ASK, hooked(), env={"LD_PRELOAD": ""}).splitlines()
    assert not missed
    assert int(checked) > 1000


def test_every_name_version_and_stream_mode_is_hooked(slice_of: Callable[..., Slice]) -> None:
    *missed, checked = slice_of(4096).run(ASK, hooked()).splitlines()
    assert not missed
    assert int(checked) > 500
