"""Patch embeddings: convolutions without overlap run as GEMMs, as accurately as in PyTorch. Others stay stock."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.overlay import bind
from hf_rocm.weights import instance_forward, patch_embeddings
from tests.replacing import replaced, scaled
from tests.tolerance import assert_as_good_as_eager

CONVOLUTIONS = {
    "image": (lambda **kwargs: nn.Conv2d(3, 20, 14, 14, **kwargs), (2, 3, 42, 28)),
    "oblong": (lambda **kwargs: nn.Conv2d(3, 7, (4, 6), (4, 6), padding="valid", **kwargs), (1, 3, 9, 13)),
    "video": (lambda **kwargs: nn.Conv3d(3, 24, (2, 14, 14), (2, 14, 14), **kwargs), (5, 3, 2, 14, 14)),
    "frames": (lambda **kwargs: nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), **kwargs), (2, 3, 5, 9, 8)),
}


class Embedding(nn.Module):
    """A model without an overlay."""

    def __init__(self, convolution):
        super().__init__()
        self.proj = convolution

    def forward(self, pixels):
        return self.proj(pixels)


def built(kind, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[kind]
    model = Embedding(make(**kwargs)).eval()
    pixels = torch.randn(shape)
    return model.to(dtype), pixels.to(dtype)


def output_and_routes(model, *inputs):
    """Returns the output, and the routes of the GEMMs that hf_rocm ran."""
    with torch.no_grad(), ops.recording() as routes:
        output = model(*inputs)
    return output, [route for route in routes if route.operation == "linear"]


def strides(tensor):
    """Returns the strides of the dims with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def served(kind="image", **kwargs):
    model, pixels = built(kind, **kwargs)
    return hf_rocm.prepare(model, force=True), pixels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_gemm_equals_the_convolution(kind, bias, dtype):
    model, pixels = built(kind, dtype, bias=bias)
    with torch.no_grad():
        exact, stock = copy.deepcopy(model).double()(pixels.double()), model(pixels)
    prepared, routes = output_and_routes(hf_rocm.prepare(model, force=True), pixels)
    assert len(routes) == 1
    assert_as_good_as_eager(prepared, stock, exact)
    assert strides(prepared) == strides(stock)


def test_the_memory_format_is_that_of_the_convolution():
    model, pixels = built("image")
    pixels = pixels.to(memory_format=torch.channels_last)
    stock = model(pixels)
    prepared, routes = output_and_routes(hf_rocm.prepare(model, force=True), pixels)
    assert routes and strides(prepared) == strides(stock) and not prepared.is_contiguous()
    torch.testing.assert_close(prepared, stock)


def siglip():
    config = transformers.SiglipVisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    return transformers.SiglipVisionModel(config).eval(), torch.randn(2, 3, 16, 16)


def test_patches_that_are_only_flattened_are_contiguous():
    """The GEMM's rows are returned as they are.

    In stock transformers, all hidden states have the strides of a transposed image.
    """
    model, pixels = siglip()
    prepared = hf_rocm.prepare(copy.deepcopy(model), force=True)
    name = next(name for name, module in model.named_modules() if type(module).__name__ == "SiglipVisionEmbeddings")
    with torch.no_grad():
        stock, hidden = (one.get_submodule(name)(pixels) for one in (model, prepared))
        assert hidden.is_contiguous() and not stock.is_contiguous()
        torch.testing.assert_close(hidden, stock)
        torch.testing.assert_close(prepared(pixels).last_hidden_state, model(pixels).last_hidden_state)
    convolution = prepared.get_submodule(name).patch_embedding
    assert not convolution(pixels).is_contiguous()
    hf_rocm.restore(prepared)
    assert vars(convolution).keys() == vars(model.get_submodule(name).patch_embedding).keys()


def test_a_replaced_forward_gets_the_format_of_a_convolution(monkeypatch):
    model, pixels = siglip()
    hf_rocm.prepare(model, force=True)
    embeddings = next(module for module in model.modules() if type(module).__name__ == "SiglipVisionEmbeddings")
    monkeypatch.setattr(type(embeddings), "forward", lambda self, pixels: self.patch_embedding(pixels).view(2, 48, -1))
    output, routes = output_and_routes(embeddings, pixels)
    assert routes and output.is_contiguous()


def test_the_use_of_the_patches_is_read_from_the_source():
    from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchEmbed
    from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings
    from transformers.models.vit.modeling_vit import ViTPatchEmbeddings

    flattens = patch_embeddings._flattens
    assert flattens(SiglipVisionEmbeddings, "patch_embedding") is SiglipVisionEmbeddings.forward
    assert flattens(ViTPatchEmbeddings, "projection") is ViTPatchEmbeddings.forward
    # The forward of `PatchEmbed` calls `view`.
    assert flattens(PatchEmbed, "proj") is None
    # `Embedding` is not a class of transformers.
    assert flattens(Embedding, "proj") is None


def test_an_empty_batch_returns_an_empty_output():
    model, pixels = served("frames")
    prepared, routes = output_and_routes(model, pixels[:0])
    assert (
        routes and prepared.shape == F.conv3d(pixels[:0], model.proj.weight, model.proj.bias, model.proj.stride).shape
    )


def test_gradients_equal_stock():
    model, pixels = built("frames")
    prepared = hf_rocm.prepare(copy.deepcopy(model), force=True)
    inputs = [pixels.clone().requires_grad_() for _ in range(2)]
    for variant, x in zip((model, prepared), inputs, strict=True):
        variant(x).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name, parameter in prepared.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_weights_are_read_in_every_call():
    model, pixels = served()
    output_and_routes(model, pixels)
    with torch.no_grad():
        model.proj.weight.mul_(2)
        model.proj.bias.zero_()
    prepared, routes = output_and_routes(model, pixels)
    torch.testing.assert_close(prepared, F.conv2d(pixels, model.proj.weight, None, 14))
    model.proj.weight = nn.Parameter(torch.randn_like(model.proj.weight) * 0.02)
    prepared, more = output_and_routes(model, pixels)
    torch.testing.assert_close(prepared, F.conv2d(pixels, model.proj.weight, model.proj.bias, 14))
    assert routes and more


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 4, 4, 2),
        lambda: nn.Conv2d(3, 4, 4, 4, padding=1),
        lambda: nn.Conv2d(3, 4, 4, (4, 2)),
        lambda: nn.Conv2d(3, 4, 4, 4, dilation=2),
        lambda: nn.Conv2d(3, 6, 4, 4, groups=3),
        lambda: nn.Conv2d(3, 4, 1, 1),
        lambda: type("Mine", (nn.Conv2d,), {})(3, 4, 4, 4),
    ],
)
def test_other_convolutions_stay_stock(make):
    torch.manual_seed(0)
    model, pixels = Embedding(make()), torch.randn(2, 3, 16, 16)
    expected = model(pixels)
    prepared, routes = output_and_routes(hf_rocm.prepare(model, force=True), pixels)
    assert torch.equal(prepared, expected) and not routes
    assert "forward" not in model.proj.__dict__


SURGERY = {
    "a forward on the instance": lambda model: setattr(model.proj, "forward", lambda x: x.sum()),
    "another convolution inside": lambda model: setattr(model.proj, "_conv_forward", lambda x, *_: x.sum()),
    "a subclass": lambda model: setattr(model.proj, "__class__", type("Mine", (nn.Conv2d,), {})),
    "another stride": lambda model: setattr(model.proj, "stride", (7, 7)),
    "a padding": lambda model: setattr(model.proj, "padding", (1, 1)),
    "another kernel size": lambda model: setattr(model.proj, "weight", nn.Parameter(torch.randn(20, 3, 2, 2))),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("surgery", SURGERY)
def test_changes_by_users_take_effect(surgery, before):
    stock, pixels = built("image")
    model = copy.deepcopy(stock)
    SURGERY[surgery](stock)
    if before:
        SURGERY[surgery](model)
    hf_rocm.prepare(model, force=True)
    if not before:
        SURGERY[surgery](model)
    if surgery == "another kernel size":
        with torch.no_grad():
            model.proj.weight.copy_(stock.proj.weight)
    prepared, routes = output_and_routes(model, pixels)
    assert torch.equal(prepared, stock(pixels)) and not routes
    hf_rocm.restore(model)
    assert torch.equal(model(pixels), stock(pixels))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("holder", "name"), [(nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (F, "conv2d"), (F, "linear")]
)
def test_functions_replaced_by_users_are_called(holder, name, before):
    stock, pixels = built("image")
    model = copy.deepcopy(stock)
    if not before:
        hf_rocm.prepare(model, force=True)
    with replaced(holder, name, scaled), torch.no_grad():
        expected = stock(pixels)
        if before:
            hf_rocm.prepare(model, force=True)
        prepared, routes = output_and_routes(model, pixels)
        assert torch.equal(prepared, expected) and not routes
    assert output_and_routes(model, pixels)[1]


def test_hooks_run():
    model, pixels = served()
    seen = []
    model.proj.register_forward_hook(lambda module, args, output: seen.append(output.shape) or output + 1)
    plain = F.conv2d(pixels, model.proj.weight, model.proj.bias, 14)
    prepared, routes = output_and_routes(model, pixels)
    torch.testing.assert_close(prepared, plain + 1)
    assert seen and routes


def test_unsupported_calls_stay_stock():
    model, pixels = served()
    stock, _ = built("image")
    assert torch.equal(output_and_routes(model, pixels[0])[0], stock(pixels[0]))
    with torch.autocast("cpu", torch.bfloat16):
        prepared, routes = output_and_routes(model, pixels)
        assert torch.equal(prepared, stock(pixels)) and not routes
    mapped = torch.func.vmap(model)(pixels[None])
    assert torch.equal(mapped[0], stock(pixels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model, pixels)
    assert torch.equal(traced(pixels), stock(pixels))
    for wrong in (pixels.double(), pixels[:, :2], pixels[..., :5]):
        with pytest.raises(RuntimeError) as prepared:
            model(wrong)
        with pytest.raises(RuntimeError) as expected:
            stock(wrong)
        assert str(prepared.value) == str(expected.value)


def test_without_force_a_model_on_the_cpu_stays_stock(monkeypatch):
    model, pixels = built("image")
    expected = model(pixels)
    patch_embeddings.attach(model, bind.GPU)
    prepared, routes = output_and_routes(model, pixels)
    assert torch.equal(prepared, expected) and not routes


def test_copies_and_pickles_work_and_can_be_restored():
    model, pixels = built("image")
    before = dict(model.proj.__dict__)
    expected = model(pixels)
    hf_rocm.prepare(model, force=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.proj.weight.zero_()
        twin.proj.bias.zero_()
    assert not output_and_routes(twin, pixels)[0].any() and output_and_routes(twin, pixels)[1]
    file = io.BytesIO(pickle.dumps(model))
    unpickled = pickle.load(file)
    assert torch.equal(unpickled(pixels), expected) or output_and_routes(unpickled, pixels)[1]
    assert output_and_routes(hf_rocm.prepare(unpickled, force=True), pixels)[1]
    for variant in (model, unpickled):
        hf_rocm.restore(variant)
        assert torch.equal(variant(pixels), expected)
    assert {name: value for name, value in model.proj.__dict__.items() if not name.startswith("_param")}.keys() == {
        name for name in before if not name.startswith("_param")
    }
    # The unpickled module has the stock forward as an attribute.
    assert not instance_forward.is_attached(unpickled.proj)


def test_preparing_again_changes_nothing_and_explain_names_the_convolution():
    model, _ = served()
    hf_rocm.prepare(model, force=True)
    assert patch_embeddings.in_force(model) == ["proj"]
    assert "as a GEMM instead of a convolution: proj" in hf_rocm.explain(model).linears
    hf_rocm.restore(model)
    assert patch_embeddings.in_force(model) == []
    model.proj.forward = lambda x: x
    hf_rocm.prepare(model, force=True)
    (line,) = hf_rocm.explain(model).linears
    assert "proj" in line and "its own forward" in line


def test_a_prepared_convolution_compiles_into_one_graph():
    model, pixels = served("frames")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(pixels), model(pixels))
