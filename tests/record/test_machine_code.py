"""Tests that unreported accesses of kernels are found in their machine code."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record.on_host import build_patch

from cudakit.record.installed import SearchPaths, find_assemblers

TEXTURES, SURFACES = "texture reads", "surface accesses"
MULTIMEM = "multimem instructions"
STORES, REDUCTIONS = "tensor-map stores", "tensor-map reductions"
ASYNCHRONOUS = "st.async or red.async to global memory"
SYSTEM = "device functions of the driver"

Reported = list[tuple[str, str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_patch(tmp_path_factory.mktemp("patch"))


@pytest.fixture(scope="module")
def ptxas() -> str:
    assemblers = find_assemblers(SearchPaths.of_this_process())
    if not assemblers:
        pytest.skip("there is no ptxas")
    return str(assemblers[0].path)


def unreported(library: ctypes.CDLL, cubin: bytes) -> Reported | None:
    """Return functions and their unreported kinds, or None if the cubin cannot be parsed."""
    reported: Reported = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    def report(_: int, function: bytes, kind: bytes) -> None:
        reported.append((function.decode(errors="replace"), kind.decode()))

    # The cubin is copied to an allocation of its own, so that a read past its end is detected.
    cubin_copy = (ctypes.c_char * max(1, len(cubin))).from_buffer_copy(cubin or b"\0")
    count = library.machine_code_find_unreported(
        cubin_copy, ctypes.c_size_t(len(cubin)), report, None
    )
    assert count == (len(reported) if count >= 0 else -1)
    return reported if count >= 0 else None


# --- output of ptxas -----------------------------------------------------------------------------

PTX = """.version 7.8
.target {target}
.address_size 64
{functions}
.visible .entry kernel(.param .u64 p, .param .u64 q, .param .u64 t, .param .u32 n) {{
    .reg .b64 %a, %b, %t; .reg .b32 %r<10>; .reg .f32 %f<10>; .reg .b32 %s;
    .shared .align 128 .b8 shared[1024];
    ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; ld.param.u64 %t, [t]; ld.param.u32 %r1, [n];
    mov.b32 %r2, %r1; mov.b32 %r3, %r1; mov.b32 %r4, %r1; mov.b32 %r5, %r1; mov.b32 %r6, 0;
    cvt.rn.f32.u32 %f1, %r1; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    mov.f32 %f5, %f1; mov.f32 %f6, %f1; mov.f32 %f7, %f1; mov.f32 %f8, %f1; mov.b32 %s, shared;
    {body}
    add.f32 %f5, %f5, %f6; add.f32 %f7, %f7, %f8;
    st.global.v2.f32 [%a], {{%f5, %f7}}; st.global.u32 [%a + 8], %r6;
    ret;
}}
.visible .entry other(.param .u64 p) {{
    .reg .b64 %a; .reg .b32 %r; ld.param.u64 %a, [p]; ld.global.u32 %r, [%a]; st.global.u32 [%a + 4], %r; ret;
}}
"""
FOUR = "{%f5, %f6, %f7, %f8}"
BULK = "cp.async.bulk.tensor.2d"
CODE: dict[
    str, tuple[int, str, str | None]
] = {  # by name: minimum compute capability, instruction, kind of unreported access
    "tex": (80, f"tex.2d.v4.f32.f32 {FOUR}, [%t, {{%f1, %f2}}];", TEXTURES),
    "tex.level": (80, f"tex.level.2d.v4.f32.f32 {FOUR}, [%t, {{%f1, %f2}}], %f3;", TEXTURES),
    "tex.grad": (
        80,
        f"tex.grad.2d.v4.f32.f32 {FOUR}, [%t, {{%f1, %f2}}], {{%f3, %f4}}, {{%f3, %f4}};",
        TEXTURES,
    ),
    "tex of integers": (80, f"tex.1d.v4.f32.s32 {FOUR}, [%t, {{%r1}}];", TEXTURES),
    "tld4": (80, f"tld4.r.2d.v4.f32.f32 {FOUR}, [%t, {{%f1, %f2}}];", TEXTURES),
    "suld": (80, "suld.b.2d.b32.trap {%r6}, [%t, {%r1, %r2}];", SURFACES),
    "sust.b": (80, "sust.b.2d.b32.trap [%t, {%r1, %r2}], {%r3};", SURFACES),
    "sust.p": (80, "sust.p.2d.v4.b32.trap [%t, {%r1, %r2}], {%r3, %r3, %r3, %r3};", SURFACES),
    "sured": (80, "sured.b.add.2d.u32.trap [%t, {%r1, %r2}], %r3;", SURFACES),
    "multimem of floats": (
        90,
        "multimem.ld_reduce.relaxed.sys.global.add.f32 %f5, [%b];",
        MULTIMEM,
    ),
    "multimem of integers": (
        90,
        "multimem.ld_reduce.relaxed.sys.global.add.u32 %r6, [%b];",
        MULTIMEM,
    ),
    "tensor store": (
        90,
        f"{BULK}.global.shared::cta.tile.bulk_group [%b, {{%r1, %r2}}], [%s];",
        STORES,
    ),
    "tensor reduction": (
        90,
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%b, {%r1, %r2}], [%s];",
        REDUCTIONS,
    ),
    "st.async": (100, "st.async.mmio.release.sys.global.u32 [%b], %r1;", ASYNCHRONOUS),
    "red.async": (100, "red.async.mmio.release.sys.global.add.u32 [%b], %r1;", ASYNCHRONOUS),
    "tex.grad in three dimensions": (
        90,  # older architectures execute it as TEX
        f"tex.grad.3d.v4.f32.f32 {FOUR}, [%t, {{%f1, %f2, %f3, %f4}}],"
        " {%f3, %f4, %f3, %f4}, {%f3, %f4, %f3, %f4};",
        SYSTEM,
    ),
    "query": (80, "txq.width.b32 %r6, [%t];", None),
    "load": (80, "ld.u32 %r6, [%b];", None),
    "atomic": (80, "atom.global.add.u32 %r6, [%b], %r1; red.global.add.f32 [%b], %f1;", None),
    "compare": (
        80,
        "atom.global.cas.b32 %r6, [%b], %r1, %r2; atom.shared.exch.b32 %r5, [%s], %r1;",
        None,
    ),
    "prefetch": (80, "prefetch.global.L2 [%b];", None),
    "asynchronous copy": (80, "cp.async.cg.shared.global [%s], [%b], 16;", None),
    "matrices": (80, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%s]; bar.sync 0;", None),
    "match": (80, "match.any.sync.b32 %r6, %r1, -1; redux.sync.add.s32 %r5, %r6, -1;", None),
    "bulk copy": (90, "cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 16;", None),
    "bulk reduction": (
        90,
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%b], [%s], 16;",
        None,
    ),
    "tensor load": (
        90,
        f"{BULK}.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [%b, {{%r1, %r2}}], [%s];",
        None,
    ),
    "st.async to shared memory": (
        90,
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%s], %r1, [%s];",
        None,
    ),
}
TARGETS = {
    80: "sm_80",
    86: "sm_86",
    89: "sm_89",
    90: "sm_90a",
    100: "sm_100a",
    103: "sm_103a",
    120: "sm_120a",
    121: "sm_121a",
}
# Instructions that ptxas translates differently for compute capability 12.x: into ordinary accesses,
# which the Sanitizer API reports, or into calls of the driver.
DIFFERENT_KINDS_12 = {"st.async": None, "red.async": None, "tensor load": SYSTEM}
# The first version of PTX that has a target, if it is above 7.8.
VERSIONS = {90: "8.1", 100: "8.7", 103: "8.8", 120: "8.7", 121: "8.8"}


def assemble(
    ptxas: str, directory: Path, capability: int, body: str, functions: str = ""
) -> bytes | None:
    source, image = directory / "code.ptx", directory / "code.cubin"
    target = TARGETS[capability]
    text = PTX.format(target=target, body=body, functions=functions)
    source.write_text(text.replace("7.8", VERSIONS.get(capability, "7.8"), 1))
    result = subprocess.run(
        [ptxas, f"-arch={target}", source, "-o", image], capture_output=True, check=False
    )
    return None if result.returncode else image.read_bytes()


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", CODE)
def test_unreported_instructions_are_found(
    library: ctypes.CDLL, ptxas: str, tmp_path: Path, capability: int, name: str
) -> None:
    min_capability, body, kind = CODE[name]
    if capability < min_capability:
        pytest.skip("there is none")
    if capability >= 120:
        kind = DIFFERENT_KINDS_12.get(name, kind)
    handles = (
        "",
        "ld.global.u64 %t, [%b];",
    )  # a handle that is a parameter, and one that is loaded
    for handle in handles if "%t" in body else handles[:1]:
        cubin = assemble(ptxas, tmp_path, capability, handle + body)
        if cubin is None:
            pytest.skip("this assembler does not support the instruction")
        expected = {("kernel", kind)} if kind else set()
        if kind == SYSTEM:  # any kernel may call a device function of the driver
            expected |= {("other", kind)}
        assert set(unreported(library, cubin) or ()) == expected
        assert unreported(library, cubin) is not None


def test_unreported_instructions_of_function_count_for_all_kernels(
    library: ctypes.CDLL, ptxas: str, tmp_path: Path
) -> None:
    function = """.visible .func (.param .f32 r) fetch(.param .u64 t) {
        .reg .b64 %t; .reg .f32 %f<9>; ld.param.u64 %t, [t]; mov.f32 %f1, 0f3F800000;
        tex.2d.v4.f32.f32 {%f5, %f6, %f7, %f8}, [%t, {%f1, %f1}];
        add.f32 %f5, %f5, %f6; add.f32 %f7, %f7, %f8; add.f32 %f5, %f5, %f7;
        st.param.f32 [r], %f5; ret; }"""
    source, image = tmp_path / "code.ptx", tmp_path / "code.cubin"
    body = ""
    text = PTX.format(target="sm_80", body=body, functions=function)
    source.write_text(text)
    subprocess.run([ptxas, "-arch=sm_80", "-c", source, "-o", image], check=True)
    assert set(unreported(library, image.read_bytes()) or ()) >= {
        ("kernel", TEXTURES),
        ("other", TEXTURES),
    }


# --- ELF files built by the test
# -----------------------------------------------------------------------------------

PROGBITS, SYMTAB, STRTAB, NOBITS = 1, 2, 3, 8
EXECUTABLE, COMPRESSED = 4, 1 << 11
FUNCTION, KERNEL = 2, 0x10


def instructions(*opcodes: int) -> bytes:
    return b"".join(struct.pack("<QQ", opcode | 0xABCDE << 12, 0x160) for opcode in opcodes)


class Image:
    """Builds an ELF file, section by section."""

    def __init__(self) -> None:
        self.names, self.strings, self.content = b"\0", b"\0", b""
        self.sections = [struct.pack("<IIQQQQIIQQ", *(0,) * 10)]
        self.symbols = b"\0" * 24

    def add(self, name: str, kind: int, content: bytes, *, flags: int = 0, link: int = 0) -> int:
        offset = len(self.names)
        self.names += name.encode() + b"\0"
        header = (offset, kind, flags, 0, 64 + len(self.content), len(content), link, 0, 1, 0)
        self.sections.append(struct.pack("<IIQQQQIIQQ", *header))
        self.content += content
        return len(self.sections) - 1

    def code(self, name: str, *opcodes: int, kernel: bool = True, flags: int = EXECUTABLE) -> None:
        section = self.add(f".text.{name}", PROGBITS, instructions(*opcodes), flags=flags)
        self.symbol(name, section, KERNEL if kernel else 0)

    def symbol(self, name: str, section: int, st_other: int) -> None:
        self.symbols += struct.pack("<IBBHQQ", len(self.strings), FUNCTION, st_other, section, 0, 0)
        self.strings += name.encode() + b"\0"

    def file(self, *, symbols: bool = True) -> bytes:
        if symbols:
            strings = self.add(".strtab", STRTAB, self.strings)
            self.add(".symtab", SYMTAB, self.symbols, link=strings)
        self.add(".shstrtab", STRTAB, self.names + b".shstrtab\0")
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        offset = 64 + len(self.content)
        header_fields = (
            2,
            190,
            1,
            0,
            0,
            offset,
            0,
            64,
            0,
            0,
            64,
            len(self.sections),
            len(self.sections) - 1,
        )
        header = ident + struct.pack("<HHIQQQIHHHHHH", *header_fields)
        return header + self.content + b"".join(self.sections)


def make_image() -> Image:
    image = Image()
    image.code("one", 0x7918, 0xB60, 0x94D)
    image.code("two", 0x981, 0x986, 0x94D)
    image.code("three", 0x3B5, 0x3B6, 0x59F, 0xF60)
    return image


def test_each_kernel_reports_each_kind_once(library: ctypes.CDLL) -> None:
    assert unreported(library, make_image().file()) == [
        ("one", TEXTURES),
        ("three", TEXTURES),
        ("three", SURFACES),
        ("three", STORES),
        ("three", REDUCTIONS),
    ]


def test_device_functions_count_for_every_kernel(library: ctypes.CDLL) -> None:
    image = make_image()
    image.code("helper", 0x9A5, kernel=False)
    reported = unreported(library, image.file()) or []
    assert {name for name, kind in reported if kind == MULTIMEM} == {
        "one",
        "two",
        "three",
        "helper",
    }
    assert ("two", TEXTURES) not in reported


def test_driver_functions_are_reported_as_unreported_accesses(library: ctypes.CDLL) -> None:
    image = Image()
    image.code("one", 0x94D)
    image.symbol("vprintf", 0, 0)
    assert unreported(library, image.file()) == []
    image = Image()
    image.code("one", 0x94D)
    image.symbol("__cuda_syscall_tex_grad_3d_v4_f32_f32", 0, 0)
    assert unreported(library, image.file()) == [("one", SYSTEM)]


def test_without_symbols_functions_count_for_all(library: ctypes.CDLL) -> None:
    reported = unreported(library, make_image().file(symbols=False)) or []
    assert {name for name, kind in reported if kind == SURFACES} == {"one", "two", "three"}


@pytest.mark.parametrize("size", [0, 3, 63, 64, 100, -1])
def test_truncated_cubin_is_unreadable(library: ctypes.CDLL, size: int) -> None:
    assert unreported(library, make_image().file()[:size]) is None


def test_compressed_or_unnamed_code_is_unreadable(library: ctypes.CDLL) -> None:
    image = make_image()
    image.code("four", 0x94D, flags=EXECUTABLE | COMPRESSED)
    assert unreported(library, image.file()) is None
    image = make_image()
    image.add(".code", PROGBITS, instructions(0x94D), flags=EXECUTABLE)
    assert unreported(library, image.file()) is None


@given(seed=st.integers(0, 1 << 30), changes=st.integers(1, 8))
def test_damaged_cubin_is_read_within_bounds(library: ctypes.CDLL, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    cubin = bytearray(make_image().file())
    for _ in range(changes):
        offset = rng.choice([rng.randrange(64), rng.randrange(len(cubin))])
        cubin[offset] = rng.choice([0, 0xFF, 0x7F, rng.randrange(256)])
    unreported(library, bytes(cubin[: rng.choice([len(cubin), rng.randrange(len(cubin) + 1)])]))
