"""The lines of a drafted attention forward between its fallback and its output projection."""

from __future__ import annotations

from lib.attention_shape import Attention, Unknown

WIDTH = 120


def norms(shape: Attention) -> str:
    """The names of the norms over the head dim, as the source of a tuple; empty if there are none."""
    query, key, _ = shape.parts
    return f'("{query.head_norm}", "{key.head_norm}")' if query.head_norm or key.head_norm else ""


def projections(shape: Attention, x: str, norms: str, fused: str) -> list[str]:
    query, key, value = shape.parts
    head_dim = query.head_dim or "self.head_dim"
    linears = [part.linear for part in shape.parts]
    if len({part.head_dim for part in shape.parts}) != 1 or value.head_norm or value.flat_norm:
        raise Unknown("different head dims, or a norm of the values")
    if len(set(linears)) == 3 and not (query.flat_norm or key.flat_norm):
        width = "" if head_dim == "self.head_dim" else f", head_dim={head_dim}"
        quoted = ", ".join(f'"{name}"' for name in linears)
        given = f", norms={norms}" if norms else ""
        call = f"layers.heads(self, {x}, {quoted}{given}{width}{fused})".replace("'", '"')
        line = f"query, key, value = {call}"
        return [f"{line}  # [B, H | Hkv, S, D]" if len(line) < WIDTH - 32 else line]
    if len(set(linears)) == 3:
        quoted = ", ".join(f'"{name}"' for name in linears)
        normed = [
            f"self.{norm}({name})" if norm else name
            for name, norm in (("query", query.flat_norm), ("key", key.flat_norm))
        ]
        return [
            f"query, key, value = layers.project(self, {x}, {quoted}{fused})  # [B, S, heads · D]",
            f"query, key, value = layers.split_heads(({', '.join(normed)}, value), {head_dim})",
        ]
    if len(set(linears)) > 1 or query.head_norm or query.flat_norm:
        raise Unknown("a partly joined projection, or a joined projection with norms")
    if query.chunk is not None:
        return [
            f"(joined,) = layers.split_heads((self.{query.linear}({x}),), {head_dim})",
            "query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]",
        ]
    if not (query.bounds and key.bounds and value.bounds) or key.bounds != (query.bounds[1], value.bounds[0]):
        raise Unknown("a joined projection whose parts are not adjacent")
    return [
        f"bounds = ({key.bounds[0]}, {key.bounds[1]})",
        f"parts = self.{query.linear}({x}).tensor_split(bounds, dim=-1)",
        f"query, key, value = layers.split_heads(parts, {head_dim})  # [B, H | Hkv, S, D]",
    ]


def attend_lines(shape: Attention, parts: list[str], cache: str, norms: str) -> list[str]:
    """The lines from the projections to the output of attention, with `layers.attend`."""
    *before, last = parts
    positions, lines = "position_embeddings", [*before, last.replace("query, key, value = ", "heads = ")]
    if shape.rope_if:
        positions = "positions"
        lines.append(f"positions = position_embeddings if {shape.rope_if} else None")
    terms = {"scale": shape.scale, **({"norms": norms} if norms else {}), **shape.terms}
    entries = ", ".join(f'"{name}": {text}' for name, text in terms.items())
    return [
        *lines,
        f"terms = {{{entries}}}",
        "output, weights = layers.attend(",
        f"    self, {shape.rope}, heads, {positions}, {cache}, attention_mask, kwargs, **terms",
        ")",
    ]


def attention_lines(shape: Attention, cache: str, halves: bool) -> list[str]:
    """The lines from the heads to the output of attention, for other rotations and for layers without a cache."""
    lines = []
    if shape.rope:
        prepared, stock = f"layers.rotate({shape.rope}, query, key, ", f"{shape.rope}(query, key, *"
        rotated = f"query, key = {prepared if halves else stock}position_embeddings)"
        lines += [f"if {shape.rope_if}:", f"    {rotated}"] if shape.rope_if else [rotated]
    if shape.cache:
        positions = ", position_embeddings" if shape.rope else ""
        lines.append(f"key, value = layers.update_cache(self, key, value, {cache}, kwargs{positions})")
    window = shape.terms.get("window", "")
    direct = {"window": window} if set(shape.terms) == {"window"} and len(window) <= len("self.sliding_window") else {}
    lines += [f"{name} = {text}" for name, text in shape.terms.items() if name not in direct]
    terms = "".join(f", {name}={direct.get(name, name)}" for name in shape.terms)
    lines.append(f"key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs{terms})")
    terms = "".join(f", {name}={name}" for name in shape.terms if name != "window")
    return [*lines, f"output, weights = ops.attention(query, key, value, scale={shape.scale}{terms}, **seen)"]
