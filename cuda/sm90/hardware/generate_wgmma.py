#!/usr/bin/env python3
"""Writes wgmma.cuh: one struct per N, because inline assembly needs every register spelled out.

Run from this directory after changing SIZES; the output is checked in.
"""

import textwrap

# N of the products in use. Forward: key tiles for Q K^T, value sizes for P V; backward: rows of a
# step for K Q^T and V dO^T, head sizes for dv and dk, 64 columns for dq; tangent: as forward.
SIZES = (32, 48, 64, 80, 96, 112, 128, 192, 256)

HEADER = """\
// Written by generate_wgmma.py: do not edit.
//
// wgmma.mma_async.m64nNk16, float32 accumulators, 16-bit operands of type kMath. `ss` takes A from
// shared memory, `rs` from registers; B always comes from shared memory. A transpose flag of 1 says
// that the operand lies MN-major (the reduced axis is not the contiguous one). `accumulate` = 0
// overwrites d. The caller issues wgmma_fence before and wgmma_commit and wgmma_wait after.
#pragma once

#include "sm90/hardware/ptx.cuh"

// clang-format off
namespace jaxflash::sm90 {

template <int N>
struct Wgmma;
"""

FOOTER = """
}  // namespace jaxflash::sm90
"""


def wrap(items: list[str], indent: str, width: int = 100) -> list[str]:
    text = ", ".join(items)
    return textwrap.wrap(text, width=width - len(indent), break_on_hyphens=False)


def asm_call(n: int, a_count: int, immediates: list[str], inputs: list[str]) -> str:
    """The asm statement: operands are d..., then a, b and accumulate, then the immediates."""
    regs = n // 2
    first = regs + a_count + 1  # the operand after b
    a = ", ".join(f"%{regs + i}" for i in range(a_count))
    if a_count > 1:
        a = "{" + a + "}"
    numbered = ", ".join(f"%{first + 1 + i}" for i in range(len(immediates)))
    kind = f"%{first + 1 + len(immediates)}"
    pad = " " * 8
    lines = [f'{pad}"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{first}, 0;\\n"']
    lines.append(f'{pad}"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{"')
    for line in wrap([f"%{i}" for i in range(regs)], pad + '""'):
        lines.append(f'{pad}"{line}"')
    lines.append(f'{pad}"}}, {a}, %{first - 1}, p, 1, 1, {numbered};\\n}}\\n"')
    outputs = wrap([f'"+f"(d[{i}])' for i in range(regs)], pad + ": ")
    lines.append(f"{pad}: {outputs[0]}")
    lines += [f"{pad}  {line}" for line in outputs[1:]]
    operands = [*inputs, '"l"(b)', '"r"(accumulate)', *(f'"n"({i})' for i in immediates)]
    operands.append('"C"(MathTraits<kMath>::kPtxType)')
    wrapped = wrap(operands, pad + ": ")
    lines.append(f"{pad}: {wrapped[0]}")
    lines += [f"{pad}  {line}" for line in wrapped[1:]]
    return "    asm volatile(\n" + "\n".join(lines) + ");\n"


def struct(n: int) -> str:
    ss = asm_call(n, 1, ["kTransposeA", "kTransposeB"], ['"l"(a)'])
    rs = asm_call(n, 4, ["kTransposeB"], [f'"r"(a[{i}])' for i in range(4)])
    return f"""
template <>
struct Wgmma<{n}> {{
  template <Math kMath, int kTransposeA, int kTransposeB>
  __device__ __forceinline__ static void ss(float (&d)[{n // 2}], uint64_t a, uint64_t b,
                                            int accumulate) {{
{ss}  }}
  template <Math kMath, int kTransposeB>
  __device__ __forceinline__ static void rs(float (&d)[{n // 2}], const uint32_t* a, uint64_t b,
                                            int accumulate) {{
{rs}  }}
}};
"""


if __name__ == "__main__":
    with open("wgmma.cuh", "w") as file:
        file.write(HEADER + "".join(map(struct, SIZES)) + FOOTER)
