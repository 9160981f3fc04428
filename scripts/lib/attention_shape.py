"""Parse a stock attention forward statement by statement. An unknown statement is an error and is never ignored.

Supported: separate or joined projections, norms over a head or over the whole projection, rotary embeddings, the cache,
the attention interface with its terms, the output projection and its dropout.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace

# transformers' name → hf_rocm's name
TERMS = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}


class Unknown(Exception):
    """Code that can't be drafted. The message is its text, or a description."""


@dataclass(frozen=True)
class Part:
    """Query, key or value: the linear layer that computes it, and the operations on its output.

    flat_norm: a norm over the whole projection, before it is split into heads. head_dim: None before the split.
    transposed: whether its layout is [B, heads, S, D]. bounds: its columns in a joined projection. chunk: the index of
    its third of every head in a joined projection. scale: a factor of the queries, which can become the scale of
    attention.
    """

    linear: str
    flat_norm: str | None = None
    head_norm: str | None = None
    head_dim: str | None = None
    transposed: bool = False
    bounds: tuple[str | None, str | None] | None = None
    chunk: int | None = None
    scale: str | None = None


@dataclass
class Attention:
    """The properties of an attention class that an overlay needs."""

    cls: str
    parameters: list[ast.arg]
    defaults: list[ast.expr]
    cache: str | None
    parts: tuple[Part, Part, Part] = ()  # type: ignore[assignment]
    rope: str | None = None
    rope_if: str | None = None
    terms: dict[str, str] = field(default_factory=dict)
    scale: str = "None"
    dropout: str | None = None
    output: str = ""
    output_dropout: str | None = None


def attention_shape(cls: ast.ClassDef, forward: ast.FunctionDef) -> Attention:
    """Parse the forward. Raises `Unknown` with the first line of the first unknown statement."""
    return _Reader(cls, forward).read()


class _Reader:
    def __init__(self, cls: ast.ClassDef, forward: ast.FunctionDef) -> None:
        arguments = forward.args
        names = [argument.arg for argument in arguments.args[1:]]
        cache = next((name for name in names if name in ("past_key_values", "past_key_value")), None)
        # with a cache, arguments after it and after the mask are passed by keyword, and stock receives them in **kwargs
        last = max(names.index(name) for name in (cache, "attention_mask") if name in names) if cache else len(names)
        kept = arguments.args[1 : last + 2]
        required = len(arguments.args) - len(arguments.defaults)
        defaults = arguments.defaults[: max(0, len(kept) + 1 - required)]
        if arguments.kwarg is None or arguments.vararg is not None:
            raise Unknown(f"def forward({ast.unparse(arguments)})")
        self.attention = Attention(cls.name, kept, defaults, cache)
        self.cls, self.forward, self.x = cls, forward, names[0]
        self.values: dict[str, object] = {self.x: "x"}
        # Shapes and sizes, by variable name.
        self.texts: dict[str, str] = {}

    def read(self) -> Attention:
        for statement in self.forward.body:
            try:
                self._statement(statement)
            except (Unknown, KeyError, ValueError, AttributeError, TypeError) as error:
                raise Unknown(ast.unparse(statement).splitlines()[0]) from error
        complete = self.attention.parts and self.attention.output
        if not complete or (self.attention.rope_if and not self.attention.rope):
            raise Unknown("no call to the attention interface")
        return self.attention

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.Return):
            self._return(statement)
        elif isinstance(statement, ast.If):
            self._condition(statement)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        else:
            raise Unknown

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        names = [element.id for element in target.elts] if isinstance(target, ast.Tuple) else [target.id]  # type: ignore[attr-defined]
        text = ast.unparse(value)
        if names == ["attention_interface"]:
            return
        if "attention_interface(" in text:
            self._interface(value)
            self.values.update({names[0]: "output", names[1]: "weights"})
        elif text == "position_embeddings":
            self.values.update({names[0]: "cos", names[1]: "sin"})
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and "rotary" in value.func.id:
            given = [self._value(argument) for argument in value.args]
            query, key, cos, sin = given
            if not (self._heads(query) and self._heads(key)) or (cos, sin) != ("cos", "sin") or value.keywords:
                raise Unknown
            self.attention.rope = value.func.id
            self.values.update({names[0]: query, names[1]: key})
        elif isinstance(value, ast.Call) and text.endswith(".chunk(3, dim=-1)"):
            joined = self._value(value.func.value)  # type: ignore[attr-defined]
            if not isinstance(joined, Part) or not joined.head_dim:
                raise Unknown
            for index, name in enumerate(names):
                self.values[name] = replace(joined, chunk=index)
        elif text.startswith(f"{self.x}.shape") or text.startswith(f"{self.x}.size()"):
            self.texts.update(dict.fromkeys(names, text))
        elif isinstance(value, ast.Tuple) or not self._mentions(value):
            (name,) = names
            self.texts[name] = self._inlined(value)
        else:
            (name,) = names
            self.values[name] = self._value(value)

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return self.values[node.id]
        if isinstance(node, ast.Subscript):
            return self._columns(node)
        if isinstance(node, ast.BinOp):
            return self._scaled(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            raise Unknown
        function, name = node.func, node.func.attr
        if isinstance(function.value, ast.Name) and function.value.id == "self":
            (argument,) = node.args
            return self._child(name, self._value(argument))
        if ast.unparse(function) in ("nn.functional.dropout", "F.dropout"):
            return self._dropout(node)
        inner = self._value(function.value)
        if inner == "output" and name in ("reshape", "view", "contiguous"):
            return inner
        if not isinstance(inner, Part) or node.keywords:
            raise Unknown
        if name == "contiguous":
            return inner
        if name == "transpose" and ast.unparse(node).endswith(".transpose(1, 2)") and inner.head_dim:
            return replace(inner, transposed=not inner.transposed)
        if name in ("view", "reshape") and not inner.head_dim:
            shape = ", ".join(self._inlined(argument) for argument in node.args).strip("()")
            return replace(inner, head_dim=shape.rsplit(", ", 1)[1])
        raise Unknown

    def _scaled(self, node: ast.BinOp) -> Part:
        part, factor = self._value(node.left), ast.unparse(node.right)
        if not isinstance(part, Part) or part.scale or not isinstance(node.op, ast.Mult):
            raise Unknown
        if not factor.startswith("self.scal"):
            raise Unknown
        return replace(part, scale=factor)

    def _child(self, name: str, value: object) -> object:
        if value == "x":
            return Part(name)
        if value == "output" and not self.attention.output:
            self.attention.output = name
            return "output"
        if not isinstance(value, Part) or "norm" not in name or value.flat_norm or value.head_norm:
            raise Unknown
        # The norm would cancel this factor.
        if value.scale:
            raise Unknown
        # `layers.heads` applies norms before the rotation.
        if self.attention.rope:
            raise Unknown
        return replace(value, head_norm=name) if value.head_dim else replace(value, flat_norm=name)

    def _columns(self, node: ast.Subscript) -> Part:
        joined, index = self._value(node.value), node.slice
        if not isinstance(joined, Part) or joined.head_dim or not isinstance(index, ast.Tuple):
            raise Unknown
        rest, columns = index.elts
        if ast.unparse(rest) != "..." or not isinstance(columns, ast.Slice) or columns.step:
            raise Unknown
        lower, upper = (self._inlined(bound) if bound else None for bound in (columns.lower, columns.upper))
        return replace(joined, bounds=(lower, upper))

    def _condition(self, statement: ast.If) -> None:
        test = ast.unparse(statement.test)
        if test == f"{self.attention.cache} is not None" and not statement.orelse:
            *before, update = statement.body
            call = update.value if isinstance(update, ast.Assign) else None
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != f"{self.attention.cache}.update":
                raise Unknown
            if any("cache_kwargs" not in ast.unparse(earlier) for earlier in before):
                raise Unknown
        elif test == "self.config._attn_implementation != 'eager'":
            return
        elif not statement.orelse and "rotary" in ast.unparse(statement.body[-1]):
            for inner in statement.body:
                self._statement(inner)
            self.attention.rope_if = self._inlined(statement.test)
        elif not statement.orelse and self._norms_created_under(test):
            for inner in statement.body:
                name = inner.targets[0].id  # type: ignore[attr-defined]
                before_norm = self.values[name]
                self._statement(inner)
                after = self.values[name]
                if not (isinstance(before_norm, Part) and isinstance(after, Part) and after.head_norm):
                    raise Unknown
        else:
            raise Unknown

    def _norms_created_under(self, test: str) -> bool:
        """Whether the constructor creates norms under the same condition."""
        return any(
            isinstance(node, ast.If) and ast.unparse(node.test) == test and "norm" in ast.unparse(node)
            for method in self.cls.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
            for node in ast.walk(method)
        )

    def _interface(self, value: ast.expr) -> None:
        if not isinstance(value, ast.Call) or len(value.args) != 5:
            raise Unknown
        parts = tuple(self._value(argument) for argument in value.args[1:4])
        if not all(self._heads(part) for part in parts) or ast.unparse(value.args[4]) != "attention_mask":
            raise Unknown
        self.attention.parts = parts  # type: ignore[assignment]
        query, *others = parts
        if any(part.scale for part in others):  # type: ignore[attr-defined]
            raise Unknown
        for keyword in value.keywords:
            text = self._inlined(keyword.value)
            if keyword.arg in TERMS:
                self.attention.terms[TERMS[keyword.arg]] = text
            elif keyword.arg == "scaling":
                self.attention.scale = text
            elif keyword.arg == "dropout":
                options = ast.walk(keyword.value)
                self.attention.dropout = next(
                    ast.unparse(option)
                    for option in options
                    if isinstance(option, ast.Attribute) and "dropout" in option.attr
                )
            elif not (keyword.arg is None or (keyword.arg == "is_causal" and text == "self.is_causal")):
                raise Unknown

        if query.scale is not None:  # type: ignore[attr-defined]
            if self.attention.scale != "1.0":
                raise Unknown
            self.attention.scale = query.scale  # type: ignore[attr-defined]

    def _dropout(self, node: ast.Call) -> object:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if self._value(node.args[0]) != "output" or given.get("training") != "self.training" or "p" not in given:
            raise Unknown
        self.attention.output_dropout = given["p"]
        return "output"

    def _return(self, statement: ast.Return) -> None:
        if not isinstance(statement.value, ast.Tuple):
            raise Unknown
        if [self._value(element) for element in statement.value.elts] != ["output", "weights"]:
            raise Unknown

    def _heads(self, value: object) -> bool:
        return isinstance(value, Part) and value.transposed

    def _mentions(self, node: ast.expr) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in self.values for inner in ast.walk(node))

    def _inlined(self, node: ast.expr) -> str:
        """An expression's text, with named sizes replaced by their expressions."""
        if isinstance(node, ast.Starred):
            return f"*{self._inlined(node.value)}"
        texts = self.texts

        class Inline(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.expr:
                return ast.parse(texts[name.id], mode="eval").body if name.id in texts else name

        return ast.unparse(Inline().visit(ast.parse(ast.unparse(node), mode="eval").body)).replace("'", '"')
