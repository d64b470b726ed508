"""Libraries are thinned for machines of one kind."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

PLACE = Path(__file__).parent.parent / "thin_fatbin.py"
PTX, CUBIN = 1, 2


@pytest.fixture
def thin_fatbin():
    spec = importlib.util.spec_from_file_location("thin_fatbin", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fat_binary(*entries):
    """Returns a fat binary of `(kind, architecture)`; each payload is its architecture in 16 bytes."""
    body = b""
    for kind, arch in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 16, 0, 0, 0, 0, arch)
        body += header.ljust(64, b"\0") + bytes([arch]) * 16
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path, *fat_binaries):
    """Writes an ELF file with a section of fat binaries, and something behind it."""
    code, names = b"".join(fat_binaries), b"\0.nv_fatbin\0.shstrtab\0"
    at_names = 64 + len(code)
    at_sections = at_names + len(names)
    sections = [(0, 0, 0), (1, 64, len(code)), (12, at_names, len(names))]
    table = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections
    )
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", at_sections)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(sections), 2)
    path.write_bytes(head + code + names + table)
    return path


def left(path):
    """Returns the architectures whose payloads are not zeroed, in order."""
    data = path.read_bytes()
    return [arch for arch in range(1, 256) if bytes([arch]) * 16 in data]


def test_code_of_one_architecture_stays_and_nothing_moves(thin_fatbin, tmp_path):
    path = library(
        tmp_path / "a.so",
        fat_binary((CUBIN, 80), (CUBIN, 90), (PTX, 90), (CUBIN, 100)),
        fat_binary((CUBIN, 90)),
    )
    before = path.read_bytes()
    counts = thin_fatbin.thin(path, 90)
    assert left(path) == [90] and len(path.read_bytes()) == len(before)
    assert counts["cubin", 90, "kept"] == [2, 32] and counts["ptx", 90, "zeroed"] == [1, 16]
    payload = 64 + 16 + 64
    assert path.read_bytes()[:payload] == before[:payload], "headers stay"


def test_without_machine_code_the_newest_ptx_that_is_old_enough_stays(thin_fatbin, tmp_path):
    path = library(tmp_path / "a.so", fat_binary((PTX, 75), (PTX, 80), (CUBIN, 80), (PTX, 100)))
    assert thin_fatbin.thin(path, 90)["ptx", 80, "kept"] == [1, 16]
    data = path.read_bytes()
    assert data.count(bytes([80]) * 16) == 1 and left(path) == [80]


def test_a_library_for_other_machines_is_left_as_it_is(thin_fatbin, tmp_path):
    path = library(tmp_path / "a.so", fat_binary((CUBIN, 100), (PTX, 100)))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="nothing for sm_90"):
        thin_fatbin.thin(path, 90)
    assert path.read_bytes() == before


def test_what_is_no_library_is_told(thin_fatbin, tmp_path):
    (tmp_path / "a.so").write_bytes(b"no library" * 20)
    with pytest.raises(ValueError, match="no 64-bit"):
        thin_fatbin.thin(tmp_path / "a.so", 90)
    path = library(tmp_path / "b.so", fat_binary((7, 90)))
    with pytest.raises(ValueError, match="no entry of a fat binary at byte 80: kind 7"):
        thin_fatbin.thin(path, 90)
