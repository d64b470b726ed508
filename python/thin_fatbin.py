"""Thins a library of CUDA kernels for machines of one kind: zeroes the code of other architectures in place.

    python3 thin_fatbin.py LIBRARY.so 90

A *fat binary* in the section `.nv_fatbin` is a header and entries one behind the other: the machine code (*cubin*) or
the PTX of one architecture each. All entries stay where they are, so nothing else of the file changes, and a compressor
leaves little of those that are zeroed. Kept are the cubins of the architecture. Where a fat binary has none, the PTX of
the newest architecture that is no newer stays. Prints a table: entries and bytes, kept and zeroed.

The format is not documented by NVIDIA. Read from files as nvcc 12 and 13 write them: u32 magic, u16 version, u16 bytes
of the header, u64 bytes of all entries; an entry: u16 kind (1 is PTX, 2 a cubin), u16 version, u32 bytes of its header,
u64 bytes of its payload, 12 other bytes, u32 architecture at byte 28.
"""

import collections
import mmap
import struct
import sys

MAGIC = 0xBA55ED50
KINDS = {1: "ptx", 2: "cubin"}
Entry = collections.namedtuple("Entry", "kind arch payload size")


def section(data, name):
    """Returns the offset and the bytes of a section of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, index_of_names = struct.unpack_from("<HHH", data, 0x3A)

    def at(index):
        # Its name, flags and address come before its offset and size.
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", data, start + index * size)
        return name, offset, length

    names = at(index_of_names)[1]
    for index in range(count):
        at_name, offset, length = at(index)
        begin = names + at_name
        if data[begin : data.find(b"\0", begin)] == name.encode():
            return offset, length
    raise ValueError(f"no section {name}")


def fat_binaries(data, start, length):
    """Returns the entries of each fat binary."""
    found, at = [], start
    while at < start + length:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # Fat binaries begin at multiples of 8.
            continue
        at, end, entries = at + header, at + header + size, []
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            if kind not in KINDS or header < 64 or at + header + size > end:
                raise ValueError(
                    f"no entry of a fat binary at byte {at}: kind {kind}, header of {header} bytes"
                )
            entries.append(Entry(KINDS[kind], arch, at + header, size))
            at += header + size
        found.append(entries)
    return found


def kept(entries, arch):
    """Returns the entries of a fat binary that an architecture needs."""
    cubins = [entry for entry in entries if (entry.kind, entry.arch) == ("cubin", arch)]
    older = [entry for entry in entries if entry.kind == "ptx" and entry.arch <= arch]
    newest = max((entry.arch for entry in older), default=0)
    return cubins or [entry for entry in older if entry.arch == newest]


def thin(path, arch):
    """Zeroes in place; returns for each kind, architecture and fate the number of entries and their bytes."""
    counts = collections.defaultdict(lambda: [0, 0])
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        found = fat_binaries(data, *section(data, ".nv_fatbin"))
        if not any(kept(entries, arch) for entries in found):
            raise ValueError(f"{path} has nothing for sm_{arch}; it is left as it is")
        for entries in found:
            needed = kept(entries, arch)
            for entry in entries:
                stays = entry in needed
                if not stays:
                    data[entry.payload : entry.payload + entry.size] = bytes(entry.size)
                count = counts[entry.kind, entry.arch, "kept" if stays else "zeroed"]
                count[0] += 1
                count[1] += entry.size
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: thin_fatbin.py LIBRARY.so ARCHITECTURE, such as 90")
    for (kind, arch, fate), (entries, size) in sorted(thin(sys.argv[1], int(sys.argv[2])).items()):
        print(f"{kind:5} sm_{arch:<4} {fate:6} {entries:5} entries {size:12} bytes")
