"""What the kernels ask of the struct: cuda/common/program.cuh says what it is, and of the structs
of loads (slice, index, partial) cuda/common/capture_gradient_sums.cuh.
"""

from __future__ import annotations

# Where it says nothing else of itself; in this order.
CONSTANTS: dict[str, bool | int] = {
    "kUnitSlope": False,
    "kAdds": True,
    "kBounded": False,
    "kHasSink": False,
    "kMasks": False,
    "kHasWords": False,
    "kAllInWords": False,
    "kDrops": False,
    "kSharesLoads": False,
    "kSharesDiagonals": False,
    "kHasDiagonals": False,
    "kCapturesMove": False,
    "kStarts": False,
    "kFollowsDistance": False,
    "kBends": False,
    "kStoresGradient": False,
    "kSumsBatch": False,
    "kKeySums": 0,
    "kSumsDiagonals": False,
    "kSumsBuckets": False,
}

# Inputs that are parameters where a node is computed.
PARAMETERS = {
    "head": {"b": "b", "h": "h", "scale": "problem.scale"},
    "row": {"q": "q"},
    "column": {"kv": "kv"},
    "element": {
        "q": "q",
        "kv": "kv",
        "distance": "distance",
        "score": "s",
        "neighbour": "neighbour",
    },
}

SIGNATURES = {
    "head": "Head head(const Captures& captures, const Problem& problem, int64_t batch, int b,"
    " int h)",
    "row": "Row row(const Head& head, int q)",
    "column": "Column column(const Head& head, int kv)",
    "logit": "float logit(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance, float s)",
    "addend": "float addend(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance)",
    "logit_and_slope": "float logit_and_slope(const Head& head, const Row& row,"
    " const Column& column, int q, int kv, float distance, float s, float* slope)",
    "start": "float start(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance, float neighbour)",
    "neighbours": "const Neighbour* neighbours(const Head& head, const Row& row)",
    "neighbours_end": "int neighbours_end(const Head& head)",
    "slope_before": "float slope_before(const Head& head)",
    "slope_behind": "float slope_behind(const Head& head)",
    "visible": "bool visible(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance)",
    "words": "const uint32_t* words(const Head& head)",
    "word_rows": "int word_rows(const Head& head)",
    "word_groups": "int word_groups(const Head& head)",
    "bit": "uint32_t bit(int kv)",
    "diagonal": "Diagonal diagonal(const Head& head, int difference)",
    "inside": "bool inside(const Head& head, int least, int most)",
    "visible_beside": "bool visible_beside(const Head& head, const Row& row, const Column& column,"
    " int q, int kv, float distance)",
    "sink": "float sink(const Head& head)",
    "slice": "int64_t slice(const Head& head)",
    "index": "int64_t index(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance)",
    "capture_tangent": "float capture_tangent(const Head& head, const Row& row,"
    " const Column& column, int q, int kv, float distance, float s)",
    "partial": "float partial(const Head& head, const Row& row, const Column& column, int q,"
    " int kv, float distance, float s)",
    "key_weights": "void key_weights(const Head& head, const Row& row, const Column& column, int q,"
    " int kv, float distance, float (&weights)[kKeySums])",
    "gradient_matrix": "int64_t gradient_matrix(const Head& head)",
    "diagonal_index": "int64_t diagonal_index(const Head& head, const Row& row,"
    " const Column& column, int q, int kv, float distance)",
    "diagonal_weight": "float diagonal_weight(const Head& head)",
    "dropout": "Dropout dropout(const Captures& captures, const Problem& problem, int64_t batch,"
    " int b, int h)",
}

# Those of products that started.
SIGNATURES |= {
    f"started_{name}": SIGNATURES[name].replace(f" {name}(", f" started_{name}(")
    for name in ("logit", "logit_and_slope")
}

# Of functions whose loads along diagonals are inside their array.
INSIDE = "const Diagonal& diagonal, int step)"
