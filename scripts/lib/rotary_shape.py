"""Recognise the forward of a rotary embedding module, in the forms of all recorded releases."""

from __future__ import annotations

import ast
import re

from lib.attention_shape import Unknown

# Statements that change no result: they disable autocast, and hf_rocm computes the angles in fp32 in any case.
_IGNORED = re.compile(r"device_type = .*|with (?:torch\.autocast|maybe_autocast)\(device_type=device_type, .*\):")
_BY_TYPE = r"""inv_freq = getattr\(self, f'\{layer_type\}_inv_freq'\)
attention_scaling = getattr\(self, f'\{layer_type\}_attention_scaling'\)
"""
_EXPAND = r"\.expand\(position_ids\.shape\[0\], -1, 1\)"
_WIDE = rf"\.float\(\){_EXPAND}(?:\.to\(x\.device\))?|{_EXPAND}\.to\(dtype=torch\.float, device=x\.device\)"
_PRODUCT = rf"""inv_freq_expanded = SELFinv_freq\[None, :, None\](?:{_WIDE})
position_ids_expanded = position_ids\[:, None, :\]\.float\(\)
freqs = \(inv_freq_expanded(?:\.float\(\))? @ position_ids_expanded(?:\.float\(\))?\)\.transpose\(1, 2\)"""
# Equal to `_PRODUCT`, because every element of its matrix product has a single term.
_ELEMENTWISE = (
    r"freqs = position_ids\[\.\.\., None\]\.float\(\) \* SELFinv_freq\.to\(device=x\.device, dtype=torch\.float\)"
)
_ANGLES = r"""emb = (?P<emb>.*)
cos = emb\.cos\(\) \* SELFattention_scaling
sin = emb\.sin\(\) \* SELFattention_scaling
return \(cos(?P<cos>.*), sin(?P<sin>.*)\)"""
_FORMS = {
    "self, x, position_ids": re.compile(f"(?:{_PRODUCT}|{_ELEMENTWISE})\n{_ANGLES}".replace("SELF", r"self\.")),
    "self, x, position_ids, layer_type": re.compile(
        f"{_BY_TYPE}(?:{_PRODUCT}|{_ELEMENTWISE})\n{_ANGLES}".replace("SELF", "")
    ),
}
_LAYOUTS = {
    "torch.cat((freqs, freqs), dim=-1)": "",
    "torch.repeat_interleave(freqs, 2, dim=-1)": 'layout="pairs"',
    "freqs": 'layout="once"',
}
_CASTS = {"": "wide=True", ".to(dtype=x.dtype)": "", ".to(x.dtype)": ""}


def rotary_layer(forward: ast.FunctionDef) -> str:
    """The layer to which the module is bound, as the text after `layers.`. Raises `Unknown` for any other forward."""
    lines = [line.strip() for statement in forward.body for line in ast.unparse(statement).splitlines()]
    text = "\n".join(line for line in lines if not _IGNORED.fullmatch(line))
    form = _FORMS.get(", ".join(argument.arg for argument in forward.args.args))
    match = form.fullmatch(text) if form else None
    updated = any(ast.unparse(decorator) == "dynamic_rope_update" for decorator in forward.decorator_list)
    if match is None or not updated or match["cos"] != match["sin"]:
        raise Unknown("not a rotary embedding that layers.RotaryEmbedding covers: it stays stock")
    if match["emb"] not in _LAYOUTS or match["cos"] not in _CASTS:
        raise Unknown(f"emb = {match['emb']}, cos{match['cos']}")
    return f"RotaryEmbedding({', '.join(filter(None, (_LAYOUTS[match['emb']], _CASTS[match['cos']])))})"
