"""Draft an overlay from a stock file. Known classes are bound or given a forward; others are left to the author."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lib import attention_lines
from lib.attention_shape import Attention, Unknown, attention_shape
from lib.rotary_shape import rotary_layer

HEAD = '''\
"""ROCm overlay of {module}, {first} and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
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
_ORDER = ("RMSNorm", "RotaryEmbedding", "GatedMLP", "JoinedMLP", "StackedExperts", "PreNormLayer")
_UNGATED = re.compile(
    r"self\.\w+\((?:self\.\w+\()?(?:self\.act_fn|self\.activation_fn|self\.act)\(self\.\w+\(\w+\)\)\)?\)"
)
# The decorator of classes that transformers runs through its experts interface.
_STACKED = "use_experts_implementation"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ENCODER_DECODER = """
    @overlay.replaces({cls}, fuses=("q_proj", "k_proj", "v_proj"))
    def {name}(
        self, stock, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, key_value_states, past_key_values, attention_mask, **kwargs)
        query, key, value = layers.encoder_decoder(self, hidden_states, key_value_states, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)  # [B, S, H, D]
        return layers.pack_outputs(self.out_proj(output.flatten(2)), weights, past_key_values)
"""
_ROTATE_HALF = "return torch.cat((-x2, x1), dim=-1)"


@dataclass(frozen=True)
class Draft:
    """A draft of an overlay.

    text: its source, empty if no class is served; served: the classes that it binds or whose forward it replaces; left:
    the classes and tables that are left to the author, with the reasons.
    """

    text: str
    served: tuple[str, ...]
    left: dict[str, str]


def draft(source: bytes | str, *, module: str, first: str, bart: bytes | str = "") -> Draft:
    """Draft the overlay of a stock file, with layers and forwards for the classes that are recognised.

    bart: the release's modeling_bart.py, whose attention many models copy.
    """
    tree = ast.parse(source)
    encoder_decoder = {_statements(forward) for cls, forward in _forwards(ast.parse(bart)) if "Attention" in cls.name}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    bodies: list[str] = []
    declared: list[tuple[str, str]] = []
    names: list[str] = []
    left = dict(_tables(tree))
    for cls, forward in _forwards(tree):
        try:
            layer = _declared(cls, forward)
        except Unknown as unknown:
            left[cls.name] = str(unknown)
            continue
        if layer is not None:
            declared.append((cls.name, layer))
            names.append(cls.name)
    fused = any(layer.startswith("PreNormLayer") for _, layer in declared)
    for cls, forward in _forwards(tree):
        try:
            if cls.name in left or cls.name in names:
                continue
            if _statements(forward) in encoder_decoder:
                body: str | None = _ENCODER_DECODER.format(cls=cls.name, name=_snake(cls.name))
            else:
                body = _body(cls, forward, functions, names, fused)
        except Unknown as unknown:
            left[cls.name] = str(unknown)
            continue
        if body is not None:
            bodies.append(body)
            names.append(cls.name)
    declared.sort(key=lambda bound: _ORDER.index(bound[1].partition("(")[0]))
    lines = "".join(f"    overlay.binds({name}, layers.{layer})\n" for name, layer in declared)
    whole = (f"\n{lines}" if lines else "") + "".join(bodies)
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


def _statements(forward: ast.FunctionDef) -> str:
    """A forward's parameters, without annotations, and its statements."""
    names = ", ".join(argument.arg for argument in forward.args.args)
    statements = [ast.unparse(statement) for statement in forward.body if not _is_docstring(statement)]
    return "\n".join([names, *map(ast.unparse, forward.args.defaults), *statements])


def _tables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the tables in which models of older releases look up their attention class by implementation."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            entries = zip(statement.value.keys, statement.value.values, strict=True)
            table = {ast.unparse(key).strip("'"): ast.unparse(value) for key, value in entries if key is not None}
            if "sdpa" in table:
                yield ast.unparse(statement.targets[0]), f"a table that selects {table['sdpa']}: bind that class"


def _declared(cls: ast.ClassDef, forward: ast.FunctionDef) -> str | None:
    """The declared layer to which a class is bound, as the text after `layers.`; None for other classes."""
    if cls.name.endswith("RMSNorm"):
        return _norm(cls, forward)
    if cls.name.endswith("RotaryEmbedding"):
        return rotary_layer(forward)
    if cls.name.endswith(("MLP", "FeedForward")):
        return _mlp(forward)
    if cls.name.endswith("Experts"):
        return _experts(cls)
    return _layer(forward) if cls.name.endswith("DecoderLayer") else None


def _body(
    cls: ast.ClassDef, forward: ast.FunctionDef, functions: dict[str, ast.FunctionDef], names: list[str], fused: bool
) -> str | None:
    if "attention_interface" in ast.unparse(forward):
        shape = attention_shape(cls, forward)
        text = _attention(shape, functions, fused)
        if shape.rope and shape.rope not in names:
            names.append(shape.rope)
        return text
    if re.search(r"(Attention|LayerNorm|Experts|SparseMoeBlock|MoE)$", cls.name):
        built = {node.id for node in ast.walk(cls) if isinstance(node, ast.Name)}
        experts = next((name for name in names if name.endswith("Experts") and name in built), None)
        if experts is not None:
            raise Unknown(f"it needs no work: it calls {experts}, which is served")
        raise Unknown("not drafted: write it, or leave it stock")
    return None


def _layer(forward: ast.FunctionDef) -> str:
    match = _LAYER.fullmatch(
        "\n".join(ast.unparse(statement) for statement in forward.body if not _is_docstring(statement))
    )
    if match is None or (match["after_attention"] is None) is not (match["after_mlp"] is None):
        raise Unknown("not a pre-norm layer that PreNormLayer covers: it stays stock")
    norms, after = (match["first"], match["second"]), (match["after_attention"], match["after_mlp"])
    options = [f"norms={norms!r}"] if norms != _NORMS else []
    options += [f"post_norms={after!r}"] if after[0] else []
    options += [f"mlp={match['mlp']!r}"] if match["mlp"] != "mlp" else []
    return f"PreNormLayer({', '.join(options)})".replace("'", '"')


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _norm(cls: ast.ClassDef, forward: ast.FunctionDef) -> str:
    text = ast.unparse(cls)
    epsilon = next((name for name in ("variance_epsilon", "eps") if f"self.{name}" in text), None)
    plus = "1.0 + self.weight" in text
    has_weight = re.search(r"return self\.weight \* |\(self\.weight \* |\* \(1\.0 \+ self\.weight", text)
    if (
        epsilon is None
        or not has_weight
        or len(forward.args.args) != 2
        or "with_scale" in text
        or ".pow(2).mean(-1" not in text
    ):
        raise Unknown("not an RMS norm that layers.RMSNorm covers")
    return f'RMSNorm(eps="{epsilon}"{", one_plus=True" if plus else ""})'


def _mlp(forward: ast.FunctionDef) -> str:
    if len(forward.args.args) != 2:
        raise Unknown(f"def forward({ast.unparse(forward.args)})")
    x, result = forward.args.args[1].arg, _result(forward)
    gated = _GATED.fullmatch(result)
    if gated and gated["x"] == x:
        fuses = (gated["gate"], gated["up"])
        options = [f"fuses={fuses!r}"] if fuses != ("gate_proj", "up_proj") else []
        options += [f"activation={gated['act']!r}"] if gated["act"] != "act_fn" else []
        options += [f"down={gated['down']!r}"] if gated["down"] != "down_proj" else []
        return f"GatedMLP({', '.join(options)})".replace("'", '"')
    joined = _JOINED.fullmatch(result.replace(f"self.gate_up_proj({x}).chunk(2, dim=-1)", "J"))
    if joined:
        given = f'activation="{joined["act"]}"' if joined["act"] != "activation_fn" else ""
        return f"JoinedMLP({given})"
    if _UNGATED.fullmatch(result):
        raise Unknown("it has no gate and stays stock")
    raise Unknown(f"return {result}")


def _experts(cls: ast.ClassDef) -> str:
    decorators = [ast.unparse(decorator) for decorator in cls.decorator_list]
    # By default, gate and up are concatenated, not transposed, and have no bias.
    if decorators == [_STACKED]:
        return "StackedExperts()"
    options = next((decorator for decorator in decorators if decorator.startswith(_STACKED)), None)
    if options is not None:
        raise Unknown(f"@{options}: adapt layers.StackedExperts, or leave it stock")
    raise Unknown("experts that transformers runs one by one: write a forward, or leave them stock")


def _result(forward: ast.FunctionDef) -> str:
    """The returned expression of a straight-line function, with local names replaced by their values."""
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


def _attention(shape: Attention, functions: dict[str, ast.FunctionDef], fused: bool) -> str:
    names = ["past_key_values" if parameter.arg == shape.cache else parameter.arg for parameter in shape.parameters]
    required = len(names) - len(shape.defaults)
    defaults = [ast.unparse(default) for default in shape.defaults]
    parameters = names[:required] + [f"{name}={value}" for name, value in zip(names[required:], defaults, strict=True)]
    fuses = _fuses(shape)
    given = ", fused=fused" if fused and fuses else ""
    x, cache = names[0], "past_key_values" if shape.cache else "None"
    beyond_sdpa = ", beyond_sdpa=True" if {"softcap", "sinks"} & set(shape.terms) else ""
    dropout = f", dropout={shape.dropout}" if shape.dropout else ""
    pages = ", pages=True" if shape.cache else ""
    arguments = f"self, attention_mask, kwargs{dropout}{beyond_sdpa}{pages}"
    test = f"if layers.fallback_reason({arguments}):"
    body = [
        test if len(test) <= _WIDTH - 8 else f"if layers.fallback_reason(\n    {arguments}\n):",
        f"    return stock(self, {', '.join(names)}, **kwargs)",
    ]
    halves = shape.rope is not None and _rotates_halves(shape.rope, functions)
    together = halves and shape.cache
    norms = attention_lines.norms(shape)
    parts = attention_lines.projections(shape, x, "" if together else norms, given)
    if together:
        body += attention_lines.attend_lines(shape, parts, cache, norms)
    else:
        body += [*parts, *attention_lines.attention_lines(shape, cache, halves)]
    heads = "output" if together else "output.flatten(2)"
    output = f"self.{shape.output}({heads})"
    if shape.output_dropout:
        output = f"dropout({output}, {shape.output_dropout}, self.training)"
    elif shape.output == "o_proj":
        output = f"layers.project_out(self, {heads}{given})"
    body.append(f"return {output}, weights")
    parameters += ["fused=None"] if given else []
    return _function(shape.cls, f"self, stock, {', '.join(parameters)}, **kwargs", body, fuses=fuses)


def _fuses(shape: Attention) -> tuple[str, ...]:
    linears = tuple(part.linear for part in shape.parts)
    return linears if len(set(linears)) == 3 else ()


def _rotates_halves(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether the rotary function computes what ops.rope computes: it rotates halves, in the dtype of the tensors."""
    rope, half = functions.get(name), functions.get("rotate_half")
    if rope is None or half is None:
        return False
    text = ast.unparse(rope)
    plain = not re.search(r"float\(|\.to\(|repeat_interleave|\[\.\.\., 0::2\]|flatten|dtype", text)
    return plain and "x.shape[-1] // 2" in ast.unparse(half) and _ROTATE_HALF in ast.unparse(half)


def _function(cls: ast.ClassDef | str, parameters: str, body: list[str], fuses: tuple[str, ...] = ()) -> str:
    name = cls if isinstance(cls, str) else cls.name
    function = _snake(name)
    quoted = ", ".join(f'"{fuse}"' for fuse in fuses)
    decorator = f"    @overlay.replaces({name}{f', fuses=({quoted})' if fuses else ''})\n"
    head = f"    def {function}({parameters}):\n"
    if len(head) > _WIDTH:
        head = f"    def {function}(\n        {parameters}\n    ):\n"
    lines = "".join(f"        {line}\n" for text in body for line in text.splitlines())
    return f"\n{decorator}{head}{lines}"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
