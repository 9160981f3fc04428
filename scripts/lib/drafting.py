"""Drafts an overlay from a stock file: classes of known shapes get a forward of ours, the others stay with a person."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lib.attention_shape import Attention, Unknown, attention_shape

HEAD = '''\
"""ROCm overlay of {module}, {first} and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    {imports}

    from hf_rocm import layers{ops}
'''
_WIDTH = 120
_ACT = r"self\.(?P<act>act_fn|activation_fn|act)"
_GATED = re.compile(
    rf"self\.(?P<down>\w+)\({_ACT}\(self\.(?P<gate>\w+)\((?P<x>\w+)\)\) \* self\.(?P<up>\w+)\((?P=x)\)\)"
)
_JOINED = re.compile(rf"self\.down_proj\((?P<x>J\[1\] \* {_ACT}\(J\[0\]\))\)")
_LAYER = re.compile(
    r"""residual = hidden_states
hidden_states = self\.(?P<first>\w+)\(hidden_states\)
hidden_states, _ = self\.self_attn\(hidden_states=hidden_states, .*\)
(?:hidden_states = self\.(?P<after_attention>\w+)\(hidden_states\)
)?hidden_states = residual \+ hidden_states
residual = hidden_states
hidden_states = self\.(?P<second>\w+)\(hidden_states\)
hidden_states = self\.(?P<mlp>\w+)\(hidden_states\)
(?:hidden_states = self\.(?P<after_mlp>\w+)\(hidden_states\)
)?hidden_states = residual \+ hidden_states
return hidden_states"""
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ROTATE_HALF = "return torch.cat((-x2, x1), dim=-1)"


@dataclass(frozen=True)
class Draft:
    """text: the overlay; served: the classes that it binds; left: what a person has to look at, class by class."""

    text: str
    served: tuple[str, ...]
    left: dict[str, str]


def draft(source: bytes | str, *, module: str, first: str) -> Draft:
    """The overlay of a stock file as far as its shapes are known."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    bodies: list[str] = []
    names: list[str] = []
    left = dict(_tables(tree))
    for cls, forward in _forwards(tree):
        try:
            found = _body(cls, forward, functions, names)
        except Unknown as unknown:
            left[cls.name] = str(unknown)
            continue
        if found is not None:
            bodies.append(found)
            names.append(cls.name)
    bodies.sort(key=lambda body: [word in body for word in ("decoder_layer(", "ops.attention(", "_mlp(")], reverse=True)
    whole = "".join(bodies)
    served = tuple(name for name in names if name not in functions)
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) > _WIDTH - 4:
        line = f"from {module} import (\n" + "".join(f"        {name},\n" for name in sorted(names)) + "    )"
    if " dropout(" in whole:
        line = f"from torch.nn.functional import dropout\n    {line}"
    text = HEAD.format(module=module, first=first, imports=line, ops=", ops" if "ops." in whole else "") + whole
    return Draft(text if served else "", served, left)


def _forwards(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, ast.FunctionDef) and member.name == "forward":
                    yield statement, member


def _tables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Tables from which a model takes its attention class by the implementation's name, as older releases do."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            entries = zip(statement.value.keys, statement.value.values, strict=True)
            found = {ast.unparse(key).strip("'"): ast.unparse(value) for key, value in entries if key is not None}
            if "sdpa" in found:
                yield ast.unparse(statement.targets[0]), f"a table that builds {found['sdpa']}: bind that class"


def _body(
    cls: ast.ClassDef, forward: ast.FunctionDef, functions: dict[str, ast.FunctionDef], names: list[str]
) -> str | None:
    if cls.name.endswith("RMSNorm"):
        return _norm(cls, forward)
    if cls.name.endswith(("MLP", "FeedForward")):
        return _mlp(cls, forward)
    if cls.name.endswith("DecoderLayer"):
        return _layer(cls, forward)
    if "attention_interface" in ast.unparse(forward):
        shape = attention_shape(cls, forward)
        text = _attention(shape, functions)
        if shape.rope and shape.rope not in names:
            names.append(shape.rope)
        return text
    if re.search(r"(Attention|LayerNorm|Experts|SparseMoeBlock|MoE)$", cls.name):
        raise Unknown("of no shape that is drafted: read it, or leave it stock")
    return None


def _layer(cls: ast.ClassDef, forward: ast.FunctionDef) -> str:
    found = _LAYER.fullmatch("\n".join(ast.unparse(each) for each in forward.body if not _is_docstring(each)))
    if found is None or (found["after_attention"] is None) is not (found["after_mlp"] is None):
        raise Unknown("a decoder layer of another kind: it stays stock")
    norms, after = (found["first"], found["second"]), (found["after_attention"], found["after_mlp"])
    options = [f"norms={norms!r}"] if norms != _NORMS else []
    options += [f"post_norms={after!r}"] if after[0] else []
    options += [f"mlp={found['mlp']!r}"] if found["mlp"] != "mlp" else []
    given = "".join(f", {option}" for option in options).replace("'", '"')
    body = [f"return layers.decoder_layer(self, stock, hidden_states, args, kwargs{given})"]
    if len(body[0]) > _WIDTH - 8:
        arguments = ["self", "stock", "hidden_states", "args", "kwargs", *(each.replace("'", '"') for each in options)]
        body = ["return layers.decoder_layer(", *(f"    {each}," for each in arguments), ")"]
    return _function(cls, "self, stock, hidden_states, *args, **kwargs", body)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _norm(cls: ast.ClassDef, forward: ast.FunctionDef) -> str:
    text = ast.unparse(cls)
    epsilon = next((name for name in ("variance_epsilon", "eps") if f"self.{name}" in text), None)
    plus = "1.0 + self.weight" in text
    weighs = re.search(r"return self\.weight \* |\(self\.weight \* |\* \(1\.0 \+ self\.weight", text)
    if (
        epsilon is None
        or not weighs
        or len(forward.args.args) != 2
        or "with_scale" in text
        or ".pow(2).mean(-1" not in text
    ):
        raise Unknown("a norm of another kind")
    x = forward.args.args[1].arg
    one_plus = ", one_plus=True" if plus else ""
    return _function(
        cls, f"self, stock, {x}", [f"return layers.rms_norm(self, stock, {x}, eps=self.{epsilon}{one_plus})"]
    )


def _mlp(cls: ast.ClassDef, forward: ast.FunctionDef) -> str:
    if len(forward.args.args) != 2:
        raise Unknown(f"def forward({ast.unparse(forward.args)})")
    x, result = forward.args.args[1].arg, _result(forward)
    gated = _GATED.fullmatch(result)
    if gated and gated["x"] == x:
        extra = "" if gated["act"] in ("act_fn", "activation_fn") and gated["down"] == "down_proj" else None
        options = [f'activation="{gated["act"]}"'] if gated["act"] != "act_fn" else []
        options += [f'down="{gated["down"]}"'] if extra is None and gated["down"] != "down_proj" else []
        given = "".join(f", {option}" for option in options)
        body = [f"return layers.gated_mlp(self, stock, {x}{given})"]
        return _function(cls, f"self, stock, {x}", body, fuses=(gated["gate"], gated["up"]))
    joined = _JOINED.fullmatch(result.replace(f"self.gate_up_proj({x}).chunk(2, dim=-1)", "J"))
    if joined:
        given = f', activation="{joined["act"]}"' if joined["act"] != "activation_fn" else ""
        return _function(cls, f"self, stock, {x}", [f"return layers.joined_mlp(self, {x}{given})"])
    raise Unknown(f"return {result}")


def _result(forward: ast.FunctionDef) -> str:
    """The returned expression of a straight-line function, its local names replaced by what they hold."""
    values: dict[str, ast.expr] = {}

    class Inline(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return values.get(name.id, name)

    for statement in forward.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            return ast.unparse(Inline().visit(statement.value))
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = Inline().visit(statement.value)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            whole = Inline().visit(statement.value)
            for index, name in enumerate(statement.targets[0].elts):
                values[ast.unparse(name)] = ast.Subscript(whole, ast.Constant(index), ast.Load())
        elif not _is_docstring(statement):
            raise Unknown(ast.unparse(statement).splitlines()[0])
    raise Unknown("no return")


def _attention(shape: Attention, functions: dict[str, ast.FunctionDef]) -> str:
    names = ["past_key_values" if each.arg == shape.cache else each.arg for each in shape.parameters]
    required = len(names) - len(shape.defaults)
    defaults = [ast.unparse(each) for each in shape.defaults]
    parameters = names[:required] + [f"{name}={value}" for name, value in zip(names[required:], defaults, strict=True)]
    x, cache = names[0], "past_key_values" if shape.cache else "None"
    positions = ", position_embeddings" if shape.rope else ""
    beyond = ", beyond_sdpa=True" if {"softcap", "sinks"} & set(shape.terms) else ""
    dropout = f", dropout={shape.dropout}" if shape.dropout else ""
    body = [
        f"if layers.stays_stock(self, attention_mask, kwargs{dropout}{beyond}):",
        f"    return stock(self, {', '.join(names)}, **kwargs)",
        *_projections(shape, x),
    ]
    halves = shape.rope is not None and _rotates_halves(shape.rope, functions)
    together = halves and shape.cache and not shape.rope_if
    if together:
        body += [
            "query, key, value = layers.rotate_and_remember(",
            f"    self, {shape.rope}, query, key, value{positions}, {cache}, kwargs",
            ")",
        ]
    elif shape.rope:
        ours, stock = f"layers.rotate({shape.rope}, query, key, ", f"{shape.rope}(query, key, *"
        rotated = f"query, key = {ours if halves else stock}position_embeddings)"
        body += [f"if {shape.rope_if}:", f"    {rotated}"] if shape.rope_if else [rotated]
    if shape.cache and not together:
        body.append(f"key, value = layers.remember(self, key, value, {cache}, kwargs{positions})")
    window = shape.terms.get("window", "")
    direct = {"window": window} if set(shape.terms) == {"window"} and len(window) <= len("self.sliding_window") else {}
    body += [f"{name} = {text}" for name, text in shape.terms.items() if name not in direct]
    terms = "".join(f", {name}={direct.get(name, name)}" for name in shape.terms)
    body.append(f"key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs{terms})")
    terms = "".join(f", {name}={name}" for name in shape.terms if name != "window")
    body.append(f"output, weights = ops.attention(query, key, value, scale={shape.scale}{terms}, **seen)")
    output = f"self.{shape.output}(output.flatten(2))"
    if shape.output_dropout:
        output = f"dropout({output}, {shape.output_dropout}, self.training)"
    elif shape.output == "o_proj":
        output = f"layers.project_out(self, {x}, output.flatten(2))"
    body.append(f"return {output}, weights")
    linears = [part.linear for part in shape.parts]
    fuses = tuple(linears) if len(set(linears)) == 3 else ()
    return _function(shape.cls, f"self, stock, {', '.join(parameters)}, **kwargs", body, fuses=fuses)


def _projections(shape: Attention, x: str) -> list[str]:
    query, key, value = shape.parts
    head_dim = query.head_dim or "self.head_dim"
    linears = [part.linear for part in shape.parts]
    if len({part.head_dim for part in shape.parts}) != 1 or value.head_norm or value.flat_norm:
        raise Unknown("heads of more than one width, or a norm of the values")
    if len(set(linears)) == 3 and not (query.flat_norm or key.flat_norm):
        norms = f", norms=({query.head_norm!r}, {key.head_norm!r})" if query.head_norm or key.head_norm else ""
        width = "" if head_dim == "self.head_dim" else f", head_dim={head_dim}"
        quoted = ", ".join(f'"{name}"' for name in linears)
        call = f"layers.heads(self, {x}, {quoted}{norms}{width})".replace("'", '"')
        line = f"query, key, value = {call}"
        return [f"{line}  # [B, H | Hkv, S, D]" if len(line) < _WIDTH - 32 else line]
    if len(set(linears)) == 3:
        quoted = ", ".join(f'"{name}"' for name in linears)
        normed = [
            f"self.{norm}({name})" if norm else name
            for name, norm in (("query", query.flat_norm), ("key", key.flat_norm))
        ]
        return [
            f"query, key, value = layers.project(self, {x}, {quoted})  # [B, S, heads · D]",
            f"query, key, value = layers.split_heads(({', '.join(normed)}, value), {head_dim})",
        ]
    if len(set(linears)) > 1 or query.head_norm or query.flat_norm:
        raise Unknown("a joined projection with norms")
    if query.chunk is not None:
        return [
            f"(joined,) = layers.split_heads((self.{query.linear}({x}),), {head_dim})",
            "query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]",
        ]
    if not (query.bounds and key.bounds and value.bounds) or key.bounds != (query.bounds[1], value.bounds[0]):
        raise Unknown("a joined projection whose parts are not neighbours")
    return [
        f"bounds = ({key.bounds[0]}, {key.bounds[1]})",
        f"parts = self.{query.linear}({x}).tensor_split(bounds, dim=-1)",
        f"query, key, value = layers.split_heads(parts, {head_dim})  # [B, H | Hkv, S, D]",
    ]


def _rotates_halves(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether the rotary function does what ops.rope does: halves, in the tensors' own dtype."""
    rope, half = functions.get(name), functions.get("rotate_half")
    if rope is None or half is None:
        return False
    text = ast.unparse(rope)
    plain = not re.search(r"float\(|\.to\(|repeat_interleave|\[\.\.\., 0::2\]|flatten|dtype", text)
    return plain and "x.shape[-1] // 2" in ast.unparse(half) and _ROTATE_HALF in ast.unparse(half)


def _function(cls: ast.ClassDef | str, parameters: str, body: list[str], fuses: tuple[str, ...] = ()) -> str:
    name = cls if isinstance(cls, str) else cls.name
    function = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    quoted = ", ".join(f'"{each}"' for each in fuses)
    decorator = f"    @overlay.replaces({name}{f', fuses=({quoted})' if fuses else ''})\n"
    head = f"    def {function}({parameters}):\n"
    if len(head) > _WIDTH:
        head = f"    def {function}(\n        {parameters}\n    ):\n"
    lines = "".join(f"        {line}\n" for text in body for line in text.splitlines())
    return f"\n{decorator}{head}{lines}"
