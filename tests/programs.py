"""Score programs in the kernels' language, as small as they can be: what a printed one looks like.

See cuda/common/program.cuh for what each member is.
"""

_PROGRAM = """\
#include "common/logarithms.h"

namespace jaxflash {{
struct Program {{
  static constexpr bool kUnitSlope = {unit_slope};
  static constexpr bool kBounded = false;
  static constexpr bool kAdds = {adds};
  static constexpr bool kMasks = false;
  static constexpr bool kHasWords = false;
  static constexpr bool kAllInWords = false;
  static constexpr bool kHasSink = {has_sink};
  static constexpr bool kDrops = {drops};
  static constexpr bool kSharesLoads = false;
  static constexpr bool kSharesDiagonals = false;
  static constexpr bool kHasDiagonals = false;
  static constexpr bool kCapturesMove = {captures_move};
  static constexpr bool kStarts = false;
  static constexpr int kKeySums = 0;
  static constexpr bool kStoresGradient = false;
  static constexpr bool kSumsBatch = false;
  static constexpr bool kSumsDiagonals = false;
  static constexpr bool kSumsBuckets = false;
  struct Head {{
    float scale;
    float value;
  }};
  struct Row {{
    {row_members}
  }};
  struct Column {{}};
  struct Diagonal {{}};
  __device__ __forceinline__ static Head head(const Captures& captures, const Problem& problem,
                                              int64_t batch, int b, int h) {{
    return {{problem.scale * kLog2E, {head_value}}};
  }}
  __device__ __forceinline__ static Row row(const Head& head, int q) {{
    Row row;
    {row}
    return row;
  }}
  __device__ __forceinline__ static Column column(const Head&, int) {{ return {{}}; }}
  __device__ __forceinline__ static float addend(const Head& head, const Row& row, const Column&,
                                                 int q, int kv, float distance) {{
    return {addend};
  }}
  __device__ __forceinline__ static float logit(const Head& head, const Row& row,
                                                const Column& column, int q, int kv, float distance,
                                                float s) {{
    return {logit};
  }}
  __device__ __forceinline__ static float logit_and_slope(const Head& head, const Row& row,
                                                          const Column& column, int q, int kv,
                                                          float distance, float s, float* slope) {{
    *slope = 1.f;
    {slope}
    return logit(head, row, column, q, kv, distance, s);
  }}
  __device__ __forceinline__ static float sink(const Head& head) {{ return head.value; }}
  {dropout}
  {capture_tangent}
}};
}}
"""

_ADDS = "s * head.scale + addend(head, row, column, q, kv, distance)"


def _program(**parts) -> str:
    parts = dict(
        unit_slope="true", adds="true", has_sink="false", head_value="0.f", row_members="",
        row="", addend="0.f", logit=_ADDS, slope="", drops="false", dropout="",
        captures_move="false", capture_tangent="",
    ) | parts  # fmt: skip
    return _PROGRAM.format(**parts)


SCALE = _program(adds="false")
SINK = _program(
    adds="false",
    has_sink="true",
    head_value="kLog2E * load_capture(capture_data<BFloat16>(captures, 0, problem, batch), h)",
)
ALIBI = _program(
    head_value="kLog2E * load_capture(capture_data<float>(captures, 0, problem, batch), h)",
    addend="-fabsf(distance) * head.value",
)
SOFT_CAP = _program(
    unit_slope="false",
    head_value="problem.scale / 50.f",
    logit="50.f * kLog2E * tanh_approx(s * head.value)",
    slope="const float t = tanh_approx(s * head.value); *slope = 1.f - t * t;",
)
_DROPS = dict(
    drops="true",
    dropout="""\
__device__ __forceinline__ static Dropout dropout(const Captures& captures, const Problem& problem,
                                                    int64_t batch, int b, int h) {
    return Dropout(capture_data<uint32_t>(captures, 0, problem, batch), b, h);
  }""",
)
DROPOUT = _program(adds="false", **_DROPS)
MOVES = _program(
    adds="false",
    captures_move="true",
    head_value="load_capture(capture_data<float>(captures, 0, problem, batch), h)",
    capture_tangent="""\
__device__ __forceinline__ static float capture_tangent(const Head& head, const Row& row,
                                                          const Column&, int q, int kv,
                                                          float distance, float s) {
    return s * head.value;
  }""",
)


def registers(count: int, unit_slope: bool = True) -> str:
    """A program that keeps so many registers for each row while it works on scores."""
    return _program(
        unit_slope="true" if unit_slope else "false",
        row_members=f"float values[{count}];",
        row=f"""
    #pragma unroll
    for (int i = 0; i < {count}; ++i) row.values[i] = __sinf(q * (i + 1.f));""",
        addend=" + ".join(f"(distance + {i}.f) * row.values[{i}]" for i in range(count)),
    )
