"""Find every small change that can be made in a source file, one at a time.

A change replaces the text of one syntax node by another text and leaves the rest of the file as it is, so the
diff of a mutant is short and line numbers stay true. Sentences are left alone: a reason, a message or an
annotation that reads differently changes no decision.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

_COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_CALCULATED: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitOr: "&",
    ast.BitAnd: "|",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitXor: "|",
}
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_TYPES = ("tuple", "list", "dict", "set", "frozenset", "Callable", "Mapping", "Sequence", "Literal")
_RECORDS = ("replace", "ViewPlan", "VoteResult", "Slot", "Worker", "EndJob")


@dataclass(frozen=True)
class Mutant:
    """One change: in `path` (relative to the repository) `old`, at these offsets, becomes `new`."""

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    kind: str
    source: str  # the text of the line where the change begins
    name: str = ""  # of a mutant that is planted by hand

    @property
    def change(self) -> str:
        """The difference in one line."""
        old, new = _one_line(self.old), _one_line(self.new)
        if self.kind == "case":
            return f"drop case {old}" if new != "False" else f"drop case if {old}"
        return f"drop {old}" if not new or new == "pass" else f"{old} -> {new}"

    @property
    def key(self) -> tuple[str, str]:
        """What stays the same when lines move: the line's text and the change."""
        return self.source, self.change

    def applied(self, text: str) -> str:
        """The file with the change in it."""
        return text[: self.start] + self.new + text[self.stop :]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Every change of this file, in the order of the lines. A few do not compile (`compiles`)."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    found = {(one.start, one.stop, one.new): one for one in finder.found if one.old != one.new}
    return [found[place] for place in sorted(found)]


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _is_text(node: ast.AST) -> bool:
    """Whether this is a sentence."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class _Finder(ast.NodeVisitor):
    """Walks one module and collects its mutants."""

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    # where a node is

    def _offset(self, line: int, column: int) -> int:
        """Columns of syntax nodes count bytes."""
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def _span(self, node: ast.expr | ast.stmt | ast.pattern) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _source(self, node: ast.expr | ast.stmt | ast.pattern) -> str:
        start, stop = self._span(node)
        return self._text[start:stop]

    def _add(self, node: ast.expr | ast.stmt | ast.pattern, new: str, kind: str) -> None:
        start, stop = self._span(node)
        self._add_span(start, stop, new, kind)

    def _add_span(self, start: int, stop: int, new: str, kind: str) -> None:
        line = self._text.count("\n", 0, start) + 1
        old = self._text[start:stop]
        kind = "generation" if kind == "condition" and "generation" in old else kind
        source = self._lines[line - 1].strip()
        self.found.append(Mutant(self._path, line, start, stop, old, new, kind, source))

    def _rewritten(self, parts: list[ast.expr], joiner: str) -> str:
        return joiner.join(f"({self._source(part)})" for part in parts)

    # what is left alone

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_keyword(self, node: ast.keyword) -> None:
        # `zip(..., strict=True)` is an assertion.
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        # A type alias is an annotation too.
        if not (isinstance(node.value, ast.Name) and node.value.id in _TYPES):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # conditions

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        signs = self._gaps(sides)
        for index, operator in enumerate(node.ops):
            for swapped in _COMPARED[type(operator)]:
                changed = [f" {swapped} " if at == index else sign for at, sign in enumerate(signs)]
                new = self._source(sides[0])
                for sign, side in zip(changed, sides[1:], strict=True):
                    new += sign + self._source(side)
                self._add(node, new, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        self._add(node, f"({self._rewritten(node.values, other)})", "and/or")
        gaps = self._gaps(node.values)
        for index, value in enumerate(node.values):
            # Removed with the word after it, or before it at the end; with brackets all is rewritten.
            last = index == len(gaps)
            gap, next_to = gaps[index - last], node.values[index - 1 if last else index + 1]
            if gap.strip() == word.strip():
                start, stop = self._span(value)
                if last:
                    self._add_span(self._span(next_to)[1], stop, "", "condition")
                else:
                    self._add_span(start, self._span(next_to)[0], "", "condition")
            else:
                left = [one for one in node.values if one is not value]
                self._add(node, f"({self._rewritten(left, word)})", "condition")
        self.generic_visit(node)

    def _gaps(self, nodes: list[ast.expr]) -> list[str]:
        """The text between each two that follow each other."""
        return [self._text[self._span(a)[1] : self._span(b)[0]] for a, b in pairwise(nodes)]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({self._source(node.operand)})", "negation")
            self.generic_visit(node)
        elif isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            self._add(node, "0", "constant")
        else:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._add(node.test, "True", "condition")
        self._add(node.test, "False", "condition")
        if node.orelse:
            self._add(node.test, f"not ({self._source(node.test)})", "branch")
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        # An arm that only raises is an assertion, and one that only passes does what no arm does.
        if not all(isinstance(one, (ast.Raise, ast.Assert, ast.Pass)) for one in node.body):
            if node.guard is None:
                self._add(node.pattern, f"{self._source(node.pattern)} if False", "case")
            else:
                self._add(node.guard, "False", "case")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not _is_text(node):
            test, yes, no = (self._source(part) for part in (node.test, node.body, node.orelse))
            self._add(node, f"({no} if {test} else {yes})", "branch")
            self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add(condition, "True", "condition")
        self.generic_visit(node)

    # values

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if _is_text(node):
            return
        left, right = self._source(node.left), self._source(node.right)
        sign = _CALCULATED.get(type(node.op))
        if sign is not None and not isinstance(node.right, (ast.Set, ast.SetComp)):
            gap = self._text[self._span(node.left)[1] : self._span(node.right)[0]]
            opening, closing = gap.count(")"), gap.count("(")
            self._add(node, f"{left}{')' * opening} {sign} {'(' * closing}{right}", "arithmetic")
        if isinstance(node.op, (ast.Sub, ast.Add, ast.BitOr)):
            self._add(node, left if "\n" not in left else f"({left})", "arithmetic")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, str(not value), "constant")
        elif isinstance(value, int):
            self._add(node, str(value + 1), "constant")
            if value > 0:
                self._add(node, str(value - 1), "constant")
        elif isinstance(value, float):
            self._add(node, repr(value * 2 if value else 1.0), "constant")

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _OPPOSITE:
            if node.func.id != "sorted" or not node.keywords:
                self._add(node.func, _OPPOSITE[node.func.id], "opposite")
            elif len(node.args) == 1:
                self._add(node, f"list({self._source(node.args[0])})", "opposite")
        if isinstance(node.func, ast.Name) and node.func.id in _RECORDS:
            for keyword in node.keywords:
                self._drop(node, keyword)
        self.generic_visit(node)

    def _drop(self, call: ast.Call, keyword: ast.keyword) -> None:
        """The call without this field."""
        if _is_text(keyword.value):
            return
        start, stop = self._span(keyword.value)
        start = self._text.rindex(f"{keyword.arg}", 0, start)
        comma = self._text[stop : self._span(call)[1]]
        stop += len(comma) - len(comma.lstrip(" \n,"))
        self._add_span(start, stop, "", "field")

    def _elements(self, node: ast.Set | ast.Tuple) -> None:
        for element in node.elts:
            left = [self._source(one) for one in node.elts if one is not element]
            brackets = "{}" if isinstance(node, ast.Set) else "()"
            self._add(node, f"{brackets[0]}{', '.join(left)},{brackets[1]}", "element")

    def visit_Set(self, node: ast.Set) -> None:
        if len(node.elts) > 1:
            self._elements(node)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        values = all(isinstance(one, (ast.Attribute, ast.Constant)) for one in node.elts)
        if len(node.elts) > 1 and isinstance(node.ctx, ast.Load) and values:
            self._elements(node)
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        if isinstance(node.body, ast.Tuple) and len(node.body.elts) > 1:
            self._elements(node.body)
            for element in node.body.elts:
                self.visit(element)
        else:
            self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        pairs = list(zip(node.keys, node.values, strict=True))
        for key, value in pairs if len(pairs) > 1 else []:
            if key is not None and not _is_text(value):
                left = [
                    f"{self._source(k)}: {self._source(v)}" if k is not None else f"**{self._source(v)}"
                    for k, v in pairs
                    if v is not value
                ]
                self._add(node, f"{{{', '.join(left)}}}", "element")
        self.generic_visit(node)

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "pass", "statement")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(name.id == "__all__" for name in node.targets if isinstance(name, ast.Name)):
            return
        if all(isinstance(one, (ast.Attribute, ast.Subscript)) for one in node.targets):
            self._add(node, "pass", "statement")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_text(node.value):
            self._add(node, "pass", "statement")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "pass", "statement")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass", "statement")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "pass", "statement")
