"""From instructions to the text of a struct: what an earlier place computes is a member of that
place's struct."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from jaxflash._printer import CAPTURE_DTYPES
from jaxflash._printer.formats import (
    ADDRESS_FORMATS,
    BOOL_FORMATS,
    COMPUTED,
    FLOAT_FORMATS,
    INTEGER_FORMATS,
    UNSIGNED_FORMATS,
)
from jaxflash._printer.gradients import DiagonalSum, LoadRoots, StoredLoad
from jaxflash._printer.graph import Graph
from jaxflash._printer.lowering import PLACES, Lowering, place_of
from jaxflash._printer.node import FLOAT_MAX, Node, below, is_finite, is_nonnegative, wraps
from jaxflash._printer.starts import Start

# Inputs that are parameters where a node is computed.
_PARAMETERS = {
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

_SIGNATURES = {
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
_SIGNATURES |= {
    f"started_{name}": _SIGNATURES[name].replace(f" {name}(", f" started_{name}(")
    for name in ("logit", "logit_and_slope")
}

# Of functions whose loads along diagonals are inside their array.
_INSIDE = "const Diagonal& diagonal, int step)"

_WORDS = ("words", "word_rows", "word_groups", "bit", "visible_beside")


@dataclasses.dataclass(frozen=True)
class Words:
    """What of visibility lies in words of keys.

    Attributes:
        load: of a key's word.
        of_rows: whether its index has the row, behind the number of 128 keys.
        bit: a key's bit, which depends on the key alone.
        beside: what has to hold, too, if anything has.
    """

    load: Node
    of_rows: bool
    bit: Node
    beside: Node | None


@dataclasses.dataclass(frozen=True)
class Roots:
    """What the struct computes.

    Attributes:
        logit: in units of log 2.
        slope: d logit / d score, where the score's gradient is wanted.
        addend: what the logit adds to the score, with a slope of 1 alone.
        visible: what is not hidden, where something may be.
        words: the same in two parts, where one is of words.
        sink: where there is one.
        capture_tangent: what tangents of captures add to that of the logit, in natural units.
        start: what products may start from.
        started: logit and slope of the products that did, unless the slope is 1.
        key_weights: factors of d score in sums over the queries.
        stored: the load whose gradient d score is.
        diagonal_sum: a sum of it along diagonals.
        loads: those whose gradients are wanted.
        paired: captures of whose rows, an element for each column, a thread takes neighbours.
    """

    logit: Node
    slope: Node | None = None
    addend: Node | None = None
    visible: Node | None = None
    words: Words | None = None
    sink: Node | None = None
    capture_tangent: Node | None = None
    start: Start | None = None
    started: tuple[Node, Node] | None = None
    key_weights: tuple[Node, ...] = ()
    stored: StoredLoad | None = None
    diagonal_sum: DiagonalSum | None = None
    loads: tuple[LoadRoots, ...] = ()
    paired: Collection[int] = ()


class Writer:
    """Writes the instructions of nodes where they belong."""

    def __init__(self, graph: Graph, roots: Roots):
        self._lowering = lowering = Lowering(graph, roots.paired)
        self._names: dict[Node, str] = {}
        self._adds = roots.addend is not graph.constant(0.0)
        self._guards_slope = roots.slope is not None and not is_finite(roots.slope)
        self._logit = lowering.lowered(roots.logit)
        self._slope = None if roots.slope is None else lowering.lowered(roots.slope)
        self._addend = None if roots.addend is None else lowering.lowered(roots.addend)
        self._visible = None if roots.visible is None else lowering.lowered(roots.visible)
        self._sink = None if roots.sink is None else lowering.lowered(roots.sink)
        self._capture_tangent = None
        if roots.capture_tangent is not None:
            self._capture_tangent = lowering.lowered(roots.capture_tangent)
            self._guards_tangent = not is_finite(roots.capture_tangent)
        self._start = None
        self._start_load = None if roots.start is None else roots.start.neighbours
        if roots.start is not None:
            x = roots.start.neighbours
            address, _ = lowering.address(x, paired=True)
            end = lowering.extent(x.value[0], len(x.args) - 1)
            self._start = lowering.lowered(roots.start.value), address, end, x.value
        self._started: tuple[Node, ...] = ()
        if roots.started is not None:
            self._started = tuple(lowering.lowered(x) for x in roots.started)
        self._key_weights = [lowering.lowered(x) for x in roots.key_weights]
        self._gradient_matrix = None
        self._sums_batch = roots.stored is not None and roots.stored.sums_batch
        if roots.stored is not None:
            *of_head, _, _ = roots.stored.index
            self._gradient_matrix = lowering.offset(roots.stored.capture, tuple(of_head))
        self._words = None
        if roots.words is not None:
            x = roots.words.load
            address, _ = lowering.address(x, paired=False)
            rows, groups = graph.constant(1, "int32"), lowering.extent(x.value[0], len(x.args) - 2)
            if roots.words.of_rows:
                rows, groups = groups, lowering.extent(x.value[0], len(x.args) - 3)
                address = address.args[0]  # without the row, which is the last shift
            bit, beside = lowering.lowered(roots.words.bit), roots.words.beside
            self._words = (
                address,
                rows,
                groups,
                bit,
                *(() if beside is None else (lowering.lowered(beside),)),
            )
        self._members: dict[str, list[Node]] = {place: [] for place in PLACES}
        seen: set[Node] = set()
        places = {self._sink: "end"}
        if self._words is not None:
            places[self._words[3]] = "column"
        for root in (
            self._logit, self._slope, self._addend, self._visible, self._sink,
            self._capture_tangent, *(() if self._start is None else self._start[:3]),
            *self._started, *(() if self._words is None else self._words), *self._key_weights,
        ):  # fmt: skip
            if root is not None:
                self._need(root, places.get(root, "element"))
                self._visit(root, seen)
        if self._gradient_matrix is not None:
            self._need(self._gradient_matrix, "end")
            self._visit(self._gradient_matrix, seen)
        shown = below(self._logit) | (set() if self._slope is None else below(self._slope))
        self._diagonals = {x: load for x, load in lowering.diagonals.items() if x in shown}
        for load in self._diagonals.values():
            self._need(load.offset, "end")
            self._visit(load.offset, seen)
        self._diagonal_sum = None
        if roots.diagonal_sum is not None:
            x = roots.diagonal_sum
            self._sums_buckets = x.has_buckets
            self._diagonal_sum = lowering.offset(x.capture, x.index), lowering.lowered(x.weight)
            for root, place in zip(self._diagonal_sum, ("element", "end"), strict=True):
                self._need(root, place)
                self._visit(root, seen)
        self._loads = []
        for x in roots.loads:
            owned = (x.load.query_axis, x.load.key_axis)
            offset = lowering.offset(x.load.capture, x.index, owned)
            self._loads.append((x, offset, lowering.lowered(x.partial)))
        for load, offset, partial in self._loads:
            self._need(offset, "element" if load.load.scatter else "end")
            self._visit(offset, seen)
            self._need(partial, "element")
            self._visit(partial, seen)
        self._asks_for_numbers = any(x.op == "input" and x.value in ("b", "h") for x in seen)

    def asks_for_numbers(self, dropout: int | None) -> bool:
        """Whether the struct of `struct` makes use of the numbers of batch element and head."""
        return self._asks_for_numbers or dropout is not None

    def struct(self, dropout: int | None) -> str:
        """The text; `dropout` is the capture that says what is dropped."""
        members, sink = self._members, self._sink
        lines = ["namespace jaxflash {", "struct Program {"]
        for name, value in (
            ("kUnitSlope", self._addend is not None),
            ("kAdds", self._adds),
            ("kHasSink", sink is not None),
            ("kMasks", self._visible is not None),
            ("kHasWords", self._words is not None),
            ("kAllInWords", self._words is not None and len(self._words) < len(_WORDS)),
            ("kDrops", dropout is not None),
            ("kSharesLoads", self._lowering.shares_loads()),
            ("kSharesDiagonals", self._lowering.shares_diagonals()),
            ("kHasDiagonals", bool(self._diagonals)),
            ("kCapturesMove", self._capture_tangent is not None),
            ("kStarts", self._start is not None),
            ("kStoresGradient", self._gradient_matrix is not None),
            ("kSumsBatch", self._sums_batch),
        ):
            lines.append(f"  static constexpr bool {name} = {'true' if value else 'false'};")
        lines.append(f"  static constexpr int kKeySums = {len(self._key_weights)};")
        for name, value in (
            ("kSumsDiagonals", self._diagonal_sum is not None),
            ("kSumsBuckets", self._diagonal_sum is not None and self._sums_buckets),
        ):
            lines.append(f"  static constexpr bool {name} = {'true' if value else 'false'};")
        for place in PLACES[:3]:
            fields = [f"    {self._field(x)};" for x in members[place]]
            lines += [f"  struct {place.capitalize()} {{", *fields, "  };"]
        for place in PLACES[:3]:
            results = ", ".join(self._text(x, place) for x in members[place])
            lines += self._function(place, place, members[place], f"{{{results}}}")
        lines += self._diagonal_struct()
        for inside in (False, True) if self._diagonals else (False,):
            lines += self._logit_functions(inside=inside)
        if self._start is not None:
            start, address, end, (capture, dtype) = self._start
            lines.append(f"  static constexpr int kStartCapture = {capture};")
            lines.append(f"  using Neighbour = {CAPTURE_DTYPES[dtype]};")
            for name, root in (("start", start), ("neighbours", address), ("neighbours_end", end)):
                lines += self._function(name, "element", [root], self._text(root, "element"))
        if self._started:
            logit, slope = self._started
            lines += self._sloped_functions("started_", logit, slope)
        if self._capture_tangent is not None:
            needed, text = self._weighed(self._capture_tangent, self._guards_tangent)
            lines += self._function("capture_tangent", "element", needed, text)
        if self._key_weights:
            stores = [
                f"weights[{i}] = {self._text(x, 'element')};"
                for i, x in enumerate(self._key_weights)
            ]
            lines += self._function("key_weights", "element", self._key_weights, "", *stores)
        if self._gradient_matrix is not None:
            matrix = self._text(self._gradient_matrix, "end")
            lines += self._function("gradient_matrix", "end", [], matrix)
        if self._diagonal_sum is not None:
            for name, root, place in zip(
                ("diagonal_index", "diagonal_weight"),
                self._diagonal_sum,
                ("element", "end"),
                strict=True,
            ):
                lines += self._function(name, place, [root], self._text(root, place))
        if self._visible is not None:
            visible = self._text(self._visible, "element")
            lines += self._function("visible", "element", [self._visible], visible)
        if self._words is not None:
            for name, root in zip(_WORDS, self._words, strict=False):
                place = "column" if name == "bit" else "element"
                lines += self._function(name, place, [root], self._text(root, place))
        if sink is not None:
            lines += self._function("sink", "end", [], self._text(sink, "end"))
        if dropout is not None:
            parameters = f"capture_data<uint32_t>(captures, {dropout}, problem, batch)"
            lines += self._function("dropout", "end", [], f"Dropout({parameters}, b, h)")
        for number, load in enumerate(self._loads):
            lines += self._load_struct(number, *load)
        return "\n".join([*lines, "};", "}  // namespace jaxflash", ""])

    def _sloped_functions(
        self, prefix: str, logit: Node, slope: Node, *, inside: bool = False
    ) -> list[str]:
        text = self._text(logit, "element")
        _, factor = self._weighed(slope, self._guards_slope, logit)
        return [
            *self._function(f"{prefix}logit", "element", [logit], text, inside=inside),
            *self._function(
                f"{prefix}logit_and_slope",
                "element",
                [logit, slope],
                text,
                f"*slope = {factor};",
                inside=inside,
            ),
        ]

    def _logit_functions(self, *, inside: bool) -> list[str]:
        if self._addend is None and self._slope is not None:
            return self._sloped_functions("", self._logit, self._slope, inside=inside)
        logit = self._text(self._logit, "element")
        lines = self._function("logit", "element", [self._logit], logit, inside=inside)
        if self._addend is not None:
            addend = self._text(self._addend, "element")
            lines += self._function("addend", "element", [self._addend], addend, inside=inside)
            more = ", diagonal, step" if inside else ""
            lines += self._function(
                "logit_and_slope",
                "element",
                [],
                f"logit(head, row, column, q, kv, distance, s{more})",
                "*slope = 1.0f;",
                inside=inside,
            )
        return lines

    def _diagonal_struct(self) -> list[str]:
        """Where the loads along diagonals are, in this order, and whether they are in bounds."""
        loads = self._diagonals.items()
        fields = [f"    const {CAPTURE_DTYPES[x.value]}* {self._names[x]};" for x, _ in loads]
        addresses, tests = [], []
        for _, load in loads:
            address, offset, extent = (
                self._text(x, "element") for x in (load.address, load.offset, load.extent)
            )
            sign, ends = ("+", ("least", "most")) if load.sign > 0 else ("-", ("most", "least"))
            addresses.append(f"{address} + ({offset} {sign} difference)")
            tests += [f"{offset} {sign} {ends[0]} >= 0", f"{offset} {sign} {ends[1]} < {extent}"]
        return [
            *("  struct Diagonal {", *fields, "  };"),
            *self._function("diagonal", "end", [], f"{{{', '.join(addresses)}}}"),
            *self._function("inside", "end", [], " && ".join(tests) or "true"),
        ]

    def _function(
        self, name: str, place: str, roots, result: str, *last: str, inside: bool = False
    ) -> list[str]:
        signature = f"  __device__ __forceinline__ static {_SIGNATURES[name]} {{"
        if inside:
            signature = signature.replace(") {", f", {_INSIDE} {{")
        body: list[str] = []
        done: set[Node] = set()
        for root in roots:
            self._define(root, place, done, body, inside=inside)
        last = (*last, f"return {result};") if result else last
        return [signature, *(f"    {x}" for x in (*body, *last)), "  }"]

    def _load_struct(self, number: int, roots: LoadRoots, offset: Node, partial: Node) -> list[str]:
        load = roots.load
        lines = [f"struct Load{number} {{"]
        for name, value in (
            ("kCapture", load.capture),
            ("kRank", 2 if load.is_key_sum else len(roots.index)),
            ("kQueryAxis", load.query_axis),
            ("kKeyAxis", load.key_axis),
        ):
            lines.append(f"  static constexpr int {name} = {value};")
        for name, value in (
            ("kScatter", load.scatter),
            ("kDiagonal", load.diagonal),
            ("kKeySum", load.is_key_sum),
            ("kOfStart", self._is_of_start(roots)),
        ):
            lines.append(f"  static constexpr bool {name} = {'true' if value else 'false'};")
        lines.append(f"  using Result = {roots.result};")
        if load.scatter:
            text = self._text(offset, "element")
            lines += self._function("index", "element", [offset], text)
        elif not load.is_key_sum:
            lines += self._function("slice", "end", [], self._text(offset, "end"))
        needed, text = self._weighed(partial, not is_finite(roots.partial))
        lines += self._function("partial", "element", needed, text)
        return [f"  {line}" for line in (*lines, "};")]

    def _is_of_start(self, roots: LoadRoots) -> bool:
        """Whether a load is the one that products start from."""
        start = self._start_load
        return start is not None and (roots.load.capture, roots.index) == (
            start.value[0],
            start.args,
        )

    def _weighed(self, x: Node, guarded: bool, logit: Node | None = None) -> tuple[list[Node], str]:
        """(the nodes that it takes, the text) of what is multiplied with a probability: where the
        logit is -inf, that is 0, but `x` may be infinite or NaN."""
        text = self._text(x, "element")
        if not guarded:
            return [x], text
        logit = self._logit if logit is None else logit
        return [logit, x], f"{self._text(logit, 'element')} == -INFINITY ? 0.0f : {text}"

    # ---- Text -------------------------------------------------------------------------------

    def _visit(self, x: Node, seen: set[Node]) -> None:
        """Names the nodes below one, and finds the members of the structs."""
        if x in seen:
            return
        seen.add(x)
        for a in x.args:
            self._need(a, place_of(x))
            self._visit(a, seen)
        if x.op not in ("constant", "input"):
            self._names[x] = f"x{len(self._names)}"

    def _need(self, x: Node, place: str) -> None:
        home = place_of(x)
        if x.op == "constant" or home == place or home == "element":
            return
        if x.op == "input" and x.value in _PARAMETERS.get(place, ()):
            return
        if x not in self._members[home]:
            self._members[home].append(x)

    def _field(self, x: Node) -> str:
        kind = "int" if x.dtype == "bool" else COMPUTED.get(x.dtype, x.dtype)
        return f"{kind} {self._name(x)}"

    def _name(self, x: Node) -> str:
        return x.value if x.op == "input" else self._names[x]

    def _text(self, x: Node, place: str) -> str:
        if x.op == "constant":
            return _literal(x)
        if x.op == "input" and x.value in _PARAMETERS.get(place, ()):
            return _PARAMETERS[place][x.value]
        home = place_of(x)
        if home == place:
            return self._names[x]
        member = f"{home}.{self._name(x)}"
        return f"({member} != 0)" if x.dtype == "bool" else member

    def _define(
        self, x: Node, place: str, done: set[Node], lines: list[str], *, inside: bool = False
    ) -> None:
        if x in done or x.op in ("constant", "input") or place_of(x) != place:
            return
        done.add(x)
        name = self._names[x]
        if inside and x in self._diagonals:
            step = "step" if self._diagonals[x].sign > 0 else "-step"
            expression = f"load_capture(diagonal.{name}, {step})"
        else:
            for a in x.args:
                self._define(a, place, done, lines, inside=inside)
            expression = self._expression(x, [self._text(a, place) for a in x.args])
        kind = COMPUTED.get(x.dtype, x.dtype)
        kind = kind if kind.endswith("*") else f"const {kind}"
        lines.append(f"{kind} {name} = {expression};")

    @staticmethod
    def _expression(x: Node, args: list[str]) -> str:
        op = x.op
        if op == "select":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if op == "wrap":
            return f"{args[0]} < 0 ? {args[0]} + {args[1]} : {args[0]}"
        if op == "capture_data":
            capture, stored = x.value
            return f"capture_data<{stored}>(captures, {capture}, problem, batch)"
        if op == "extent":
            return f"capture_extent(captures, {x.value[0]}, {x.value[1]})"
        if op in ("to_int", "to_uint"):
            signed = op == "to_int"
            if x.args[0].dtype == "float32":
                return f"__float2{'int' if signed else 'uint'}_rz({args[0]})"
            return f"static_cast<{'int' if signed else 'uint32_t'}>({args[0]})"
        if op == "reciprocal":
            return f"rcp_approx({args[0]})" if place_of(x) == "element" else f"1.0f / {args[0]}"
        if op in ADDRESS_FORMATS:
            return ADDRESS_FORMATS[op].format(*args)
        if x.dtype == "float32":
            return FLOAT_FORMATS[op].format(*args)
        if x.dtype == "bool":
            return BOOL_FORMATS[op].format(*args)
        if x.dtype == "uint32" and op in UNSIGNED_FORMATS:
            return UNSIGNED_FORMATS[op].format(*args)
        if op in ("div", "rem") and x.args[1].op == "constant" and x.args[1].value not in (0, -1):
            sign = "/" if op == "div" else "%"
            if is_nonnegative(x.args[0]) and x.args[1].value > 0:  # fewer instructions than signed
                return f"static_cast<int>(static_cast<uint32_t>({args[0]}) {sign} {args[1]}u)"
            return f"{args[0]} {sign} {args[1]}"
        if op == "sra" and x.args[1].op == "constant" and 0 <= x.args[1].value < 32:
            return f"{args[0]} >> {args[1]}"
        if op in ("add", "sub") and not wraps(x):
            return f"{args[0]} {'+' if op == 'add' else '-'} {args[1]}"
        return INTEGER_FORMATS[op].format(*args)


def _literal(x: Node) -> str:
    if x.dtype == "bool":
        return "true" if x.value else "false"
    if x.dtype == "uint32":
        return f"{x.value}u"
    if x.dtype != "float32":
        # There is no negative literal, and 2147483648 is no int.
        return "(-2147483647 - 1)" if x.value == -(2**31) else str(x.value)
    if math.isnan(x.value):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(x.value) or abs(x.value) > FLOAT_MAX:
        return "INFINITY" if x.value > 0 else "-INFINITY"
    return f"{np.float32(x.value)!s}f"
