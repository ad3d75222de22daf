"""The CPU table's instruction sets, chosen through kernels/cpu/testing.h."""

import ctypes
from pathlib import Path

from tests.kernels import abi
from tests.kernels.harness import TABLES, Table, load_table, table_path

ISAS = ("portable", "avx2", "avx512")
CUDA_DEVICE = Path("/dev/nvidia0")

# Every table, the CPU's once per instruction set.
TABLE_VARIANTS = (*(f"cpu-{isa}" for isa in ISAS), *(name for name in sorted(TABLES) if name != "cpu"))


def set_isa(library: ctypes.CDLL, isa: str) -> bool:
    """False if this machine or build lacks it."""
    library.glm_cpu_set_isa.argtypes = [ctypes.c_char_p]
    return bool(library.glm_cpu_set_isa(isa.encode()) == abi.Status.OK)


def restore_widest(library: ctypes.CDLL) -> None:
    """Back to what the library chose by itself."""
    assert any(set_isa(library, isa) for isa in reversed(ISAS))


def load_variant(name: str) -> Table | None:
    """A member of TABLE_VARIANTS, or None if this machine lacks the instruction set, the GPU or the built table."""
    table, _, isa = name.partition("-")
    if (table.endswith("cuda") and not CUDA_DEVICE.exists()) or (table != "cpu" and not table_path(table).exists()):
        return None
    loaded = load_table(table)
    if not isa:
        return loaded
    if not set_isa(loaded.library, isa):
        return None
    chosen = load_table(table)
    restore_widest(loaded.library)
    return Table(name, chosen.kernels, chosen.library)
