"""Instructions of the inner loops of integer products in an object file for ARM64: what is counted where none runs.

    python -m benchmarks.kernels.instructions build/aarch64/CMakeFiles/isa_neon.dir/isa/neon/products.cpp.o

A loop is the code between a backward branch and its target; of each function that with the most products counts.
"""

import argparse
import collections
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

OBJDUMP = "aarch64-linux-gnu-objdump"
PRODUCTS = {"sdot": 16, "udot": 16, "usdot": 16, "smmla": 32, "usmmla": 32, "ummla": 32}
"""Multiply-adds of 8-bit integers in one instruction on 16-byte registers."""
KERNELS = r"multiply_tiles<|ggml_ge[mv]+_"
FORMATS = ["f32", "f16", "bf16", "q4", "q4m", "q5", "q5m", "q8", "q4k", "q5k", "q6k", "iq4nl", "iq4xs", "mxfp4",
           "nvfp4"]  # fmt: skip
"""Of native/plan/types.h, in its order."""
SOURCES = "packed", "keeps", "kept"
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s+([0-9a-f]+):\t(\S+)\s*(.*)$")
BRANCH = re.compile(r"\b([0-9a-f]+) <")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Address, mnemonic and operands."""

    address: int
    name: str
    operands: str


def functions(path: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Disassemble an object file."""
    command = [OBJDUMP, "-d", "-C", "--no-show-raw-insn", path]
    name, code = "", list[Instruction]()
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if start := FUNCTION.match(line):
            yield name, code
            name, code = start[1], []
        elif found := INSTRUCTION.match(line):
            code.append(Instruction(int(found[1], 16), found[2], found[3]))
    yield name, code


def loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the instructions from the target of each backward branch to the branch."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    for end, instruction in enumerate(code):
        target = BRANCH.search(instruction.operands) if instruction.name[:1] in "bct" else None
        if target and (start := places.get(int(target[1], 16), len(code))) <= end:
            yield code[start : end + 1]


def num_products(loop: list[Instruction]) -> int:
    """Count the multiply-adds of one turn."""
    return sum(PRODUCTS.get(instruction.name, 0) for instruction in loop)


def label(function: str) -> str:
    """Shorten a kernel's name; of Quire's: format, rows and where its weights come from."""
    if found := re.search(r"multiply_tiles<\D*WeightFormat\)(\d+), (\d+), \d+, \D*Source\)(\d)", function):
        return f"{FORMATS[int(found[1])]}, rows {found[2]}, {SOURCES[int(found[3])]}"
    return function.split("(")[0]


def main() -> None:
    """Print a line per kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+")
    parser.add_argument("--kernels", default=KERNELS, help="pattern of the functions' names")
    arguments = parser.parse_args()
    print("instructions\tproducts\tinstructions/product\tstack accesses\tkernel")
    for path in arguments.objects:
        for function, code in functions(path):
            if not re.search(arguments.kernels, function):
                continue
            best = max(loops(code), key=lambda loop: (num_products(loop), -len(loop)), default=[])
            if products := num_products(best):
                kinds = collections.Counter("[sp" in instruction.operands for instruction in best)
                print(len(best), products, f"{len(best) / products:.3f}", kinds[True], label(function), sep="\t")


if __name__ == "__main__":
    main()
