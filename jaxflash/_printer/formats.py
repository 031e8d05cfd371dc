"""What the operations of the graph are in CUDA."""

from __future__ import annotations

# As the kernels compute with what they store.
COMPUTED = {"float32": "float", "int32": "int", "uint32": "uint32_t", "bool": "bool"}

# Primitives on floats that are one function of CUDA, the same name with an f.
WITH_SUFFIX = (
    *("sqrt", "rsqrt", "cbrt", "floor", "ceil", "log1p", "expm1", "erf", "erfc", "lgamma"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
)

FLOAT_FORMATS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "times": "{0} * {1}",
    "neg": "-{0}",
    "fma": "fmaf({0}, {1}, {2})",
    "divide": "divide_approx({0}, {1})",
    "divide_by_normal": "divide_by_normal({0}, {1})",
    "quotient": "__fdiv_rn({0}, {1})",
    "rounded_times": "__fmul_rn({0}, {1})",  # not made one with an addition
    "abs": "fabsf({0})",
    "max": "max_nan({0}, {1})",
    "min": "min_nan({0}, {1})",
    "tanh": "tanh_approx({0})",
    "exp2": "exp2_approx({0})",
    "log2": "log2_approx({0})",
    "sin": "__sinf({0})",
    "cos": "__cosf({0})",
    "fmod": "fmodf({0}, {1})",
    "round": "roundf({0})",
    "round_even": "rintf({0})",
    "erf_inv": "erfinvf({0})",
    "to_float": "static_cast<float>({0})",
    **{name: f"{name}f({{0}})" for name in WITH_SUFFIX},
    "atan2": "atan2f({0}, {1})",
    "pow": "powf({0}, {1})",
}

# Overflow and shifts beyond the width are undefined in C++, and division by 0 on a host.
INTEGER_FORMATS = {
    "add": "static_cast<int>(static_cast<uint32_t>({0}) + static_cast<uint32_t>({1}))",
    "sub": "static_cast<int>(static_cast<uint32_t>({0}) - static_cast<uint32_t>({1}))",
    "mul": "static_cast<int>(static_cast<uint32_t>({0}) * static_cast<uint32_t>({1}))",
    "neg": "static_cast<int>(0u - static_cast<uint32_t>({0}))",
    "abs": "({0} < 0 ? static_cast<int>(0u - static_cast<uint32_t>({0})) : {0})",
    "div": "({1} == 0 ? -1 : {1} == -1 ? static_cast<int>(0u - static_cast<uint32_t>({0}))"
    " : {0} / {1})",
    "rem": "({1} == 0 ? {0} : {1} == -1 ? 0 : {0} % {1})",
    "max": "({0} > {1} ? {0} : {1})",
    "min": "({0} < {1} ? {0} : {1})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "sll": "(static_cast<uint32_t>({1}) < 32u"
    " ? static_cast<int>(static_cast<uint32_t>({0}) << {1}) : 0)",
    "sra": "{0} >> (static_cast<uint32_t>({1}) < 32u ? {1} : 31)",
    "srl": "(static_cast<uint32_t>({1}) < 32u"
    " ? static_cast<int>(static_cast<uint32_t>({0}) >> {1}) : 0)",
    "popc": "__popc({0})",
    "clz": "__clz({0})",
}
UNSIGNED_FORMATS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "0u - {0}",
    "div": "({1} == 0u ? 0xffffffffu : {0} / {1})",
    "rem": "({1} == 0u ? {0} : {0} % {1})",
    "sll": "({1} < 32u ? {0} << {1} : 0u)",
    "sra": "static_cast<uint32_t>(static_cast<int>({0}) >> ({1} < 32u ? {1} : 31u))",
    "srl": "({1} < 32u ? {0} >> {1} : 0u)",
    "clz": "static_cast<uint32_t>(__clz(static_cast<int>({0})))",
    "popc": "static_cast<uint32_t>(__popc({0}))",
}
BOOL_FORMATS = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "xor": "{0} != {1}",
    "not": "!{0}",
}
ADDRESS_FORMATS = {
    "shift": "{0} + {1}",
    "scale_offset": "{0} * {1}",
    "add_offset": "{0} + {1}",
    "widen": "static_cast<int64_t>({0})",
    "clamp_index": "clamp_index({0}, {1})",
    "clamp_column": "static_cast<int>(clamp_index({0}, {1}))",
    "clamp_pair": "static_cast<int>(clamp_index({0} >> 1, {1} >> 1))",
    "load_capture": "load_capture({0}, {1})",
    "load_of_pair": "load_of_pair({0}, {1}, {2} & 1)",
}
