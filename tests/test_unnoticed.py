"""What else touches a model: whoever hooks, wraps, replaces or reads finds what he would have found in stock.

Each use is a function that does something to a model and returns what came of it; it is run on a stock model and on a
patched one.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import wrapt
from compare import cache_key, named_ids, text_config
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo import FULL, SLIDING, Model, Species, text_model

import swapatch

Found = list[Any]
Use = Callable[[Model], Found]

WINDOW = 8
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
PROMPT, NEW = 20, 5


def generated(model: Model, **options: Any) -> Found:
    """Logits of every step."""
    settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, **options}
    out = model.generate(
        named_ids(model, 1, PROMPT), output_logits=True, return_dict_in_generate=True, pad_token_id=0, **settings
    )
    return [*out.logits, out.sequences]


def scored(model: Model) -> Found:
    """Logits without a cache."""
    with torch.no_grad():
        return [model(named_ids(model, 1, PROMPT), use_cache=False).logits]


def both(model: Model) -> Found:
    return [*scored(model), *generated(model)]


def sliding(model: Model, number: int = 1) -> Any:
    """One of the sliding layers; the second is never the last."""
    kinds = text_config(model).layer_types
    return text_model(model).layers[[i for i, kind in enumerate(kinds) if kind == SLIDING][number]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# -- kernels --

stock_sdpa = functional.scaled_dot_product_attention


@functools.wraps(stock_sdpa)
def softer(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return stock_sdpa(query * 0.5, *args, **kwargs)


def plain(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
    """Somebody's own: wants bool masks, and as many heads of keys as of queries unless it is told."""
    if kwargs.pop("enable_gqa", False):
        key, value = (rows.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for rows in (key, value))
    assert query.shape[1] == key.shape[1]
    scores = query @ key.transpose(2, 3) * kwargs["scale"] * 0.5
    if attn_mask is not None:
        assert attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif kwargs.get("is_causal"):
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


class SofterMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is stock_sdpa:
            args = (args[0] * 0.5, *args[1:])
        return function(*args, **(kwargs or {}))


def torch_kernel(model: Model) -> Found:
    with replaced(functional, "scaled_dot_product_attention", softer):
        return both(model)


def torch_kernel_of_ones_own(model: Model) -> Found:
    with replaced(functional, "scaled_dot_product_attention", plain):
        return both(model)


def torch_kernel_that_is_trained(model: Model) -> Found:
    with replaced(functional, "scaled_dot_product_attention", softer):
        ids = named_ids(model, 1, PROMPT)
        model(ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def torch_kernel_by_a_mode(model: Model) -> Found:
    with SofterMode():
        ids = named_ids(model, 1, PROMPT)
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [*both(model), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def torch_kernel_not_used_by_eager(model: Model) -> Found:
    model.set_attn_implementation("eager")
    return torch_kernel(model)


def registered(name: str) -> Use:
    def use(model: Model) -> Found:
        stock = ALL_ATTENTION_FUNCTIONS[name if name == "sdpa" else "sdpa"]

        @functools.wraps(stock)
        def mine(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return stock(module, query * 0.5, *args, **kwargs)

        AttentionInterface.register(name, mine)
        try:
            if name != "sdpa":
                ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
                model.set_attn_implementation(name)
            return both(model)
        finally:
            if name == "sdpa":
                AttentionInterface.register(name, stock)

    return use


def eager_function(model: Model) -> Found:
    model.set_attn_implementation("eager")
    file = inspect.getmodule(type(sliding(model).self_attn))
    stock = file.eager_attention_forward  # type: ignore[union-attr]

    def mine(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(module, query * 0.5, *args, **kwargs)

    with replaced(file, "eager_attention_forward", mine):
        return both(model)


def mask_function(model: Model) -> Found:
    stock = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        mask = stock(*args, **{**kwargs, "allow_is_causal_skip": False})
        mask = mask.clone()
        mask[..., 0] = True  # everybody sees the first key
        return mask

    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", mine)
    try:
        return both(model)
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", stock)


def mask_maker(model: Model) -> Found:
    file = inspect.getmodule(type(text_model(model)))
    stock = file.create_sliding_window_causal_mask  # type: ignore[union-attr]

    def mine(*args: Any, **kwargs: Any) -> Any:
        mask = stock(*args, **kwargs)
        if mask is not None:
            mask = mask.clone()
            mask[..., -1] = True
        return mask

    with replaced(file, "create_sliding_window_causal_mask", mine):
        return both(model)


def softmax_of_eager(model: Model) -> Found:
    """As who wants to see the weights does."""
    model.set_attn_implementation("eager")
    stock, found = functional.softmax, []

    def mine(*args: Any, **kwargs: Any) -> Tensor:
        found.append(stock(*args, **kwargs))
        return found[-1]

    with replaced(functional, "softmax", mine):
        return [*both(model), found]


def rotation(model: Model) -> Found:
    file = inspect.getmodule(type(text_model(model)))
    stock = file.apply_rotary_pos_emb  # type: ignore[union-attr]

    def mine(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(x * 0.5, *args, **kwargs)

    with replaced(file, "apply_rotary_pos_emb", mine):
        return both(model)


def overlay(model: Model) -> Found:
    """Sinks, put in where transformers makes its masks."""
    stock = masking_utils.sliding_window_overlay

    def mine(window: int) -> Any:
        inner = stock(window)
        return lambda batch, head, query, key: inner(batch, head, query, key) | (key < 2)

    with replaced(masking_utils, "sliding_window_overlay", mine):
        return both(model)


class Softer(nn.Module):
    """A function that is a module."""

    def forward(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 0.5, *args, **kwargs)


def registered_module(model: Model) -> Found:
    AttentionInterface.register("sdpa", Softer())
    try:
        return both(model)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def torch_kernel_without_masks(model: Model) -> Found:
    """As one that has no masks does: it stands back where there is one."""

    def mine(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        return stock_sdpa(query * (0.5 if attn_mask is None else 1), key, value, attn_mask=attn_mask, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", mine):
        return both(model)


def stock_layer_update(model: Model) -> Found:
    stock = DynamicSlidingWindowLayer.update

    def mine(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(self, keys * 0.5, values, *args, **kwargs)

    with replaced(DynamicSlidingWindowLayer, "update", mine):
        return both(model)


def traced(model: Model) -> Found:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.inner(ids, use_cache=False).logits
            return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(Scores().eval(), (named_ids(model, 1, PROMPT),), check_trace=False)
    return [program(named_ids(model, 1, PROMPT, seed=1))]


def module_call(model: Model) -> Found:
    stock, found = nn.Module.__call__, []

    def mine(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(kwargs.get("attention_mask")).__name__)
        return stock(self, *args, **kwargs)

    with replaced(nn.Module, "__call__", mine):
        return [*scored(model), found]


def outer_class_forward(model: Model) -> Found:
    cls = type(model.model)
    stock, found = cls.forward, []

    def mine(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(kwargs.get("attention_mask")).__name__)
        return stock(self, *args, **kwargs)

    with replaced(cls, "forward", mine):
        return [*both(model), found]


def prepared_inputs(model: Model) -> Found:
    stock, found = model.prepare_inputs_for_generation, []

    def mine(*args: Any, **kwargs: Any) -> Any:
        inputs = stock(*args, **kwargs)
        found.append(inputs["attention_mask"])
        return inputs

    model.prepare_inputs_for_generation = mine
    try:
        return [*generated(model, **STATIC), found]
    finally:
        del model.prepare_inputs_for_generation


def class_forward(model: Model) -> Found:
    cls = type(sliding(model).self_attn)
    stock = cls.forward

    def mine(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(self, hidden_states * 0.5, *args, **kwargs)

    with replaced(cls, "forward", mine):
        return both(model)


def layer_class_forward(model: Model) -> Found:
    cls = type(sliding(model))
    stock, masks = cls.forward, []

    def mine(self: Any, *args: Any, **kwargs: Any) -> Any:
        masks.append(type(kwargs["attention_mask"]).__name__)
        return stock(self, *args, **kwargs)

    with replaced(cls, "forward", mine):
        return [*both(model), masks]


def eager_in_one_layer(model: Model) -> Found:
    attention = sliding(model).self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "eager"
    found: list[Tensor] = []
    hook = attention.register_forward_hook(lambda module, args, output: found.append(output[1]))
    try:
        return [*outcome(both, model), found]
    finally:
        hook.remove()


# -- layers that are skipped, replaced, or run twice --


def skipping(number: int, steps: Callable[[int], bool] = lambda step: True) -> Use:
    def use(model: Model) -> Found:
        layer = sliding(model, number)
        stock, calls = layer.forward, iter(range(1000))

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if steps(next(calls)) else stock(hidden_states, *args, **kwargs)

        layer.forward = forward
        try:
            return [*outcome(generated, model), *outcome(scored, model)]
        finally:
            del layer.forward

    return use


def skipped_attention(model: Model) -> Found:
    """As an ablation does: the attention gives zeros, and its cache never sees a token."""
    attention = sliding(model).self_attn

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(hidden_states), None

    with replaced_forward(attention, forward):
        return both(model)


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    had, before = "forward" in vars(module), module.forward
    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = before
        else:
            del module.forward


def proxied_layer(model: Model) -> Found:
    layers, layer = text_model(model).layers, sliding(model)
    index = list(layers).index(layer)
    layers._modules[str(index)] = wrapt.ObjectProxy(layer)
    try:
        return both(model)
    finally:
        layers._modules[str(index)] = layer


def replaced_layer(model: Model) -> Found:
    """By a fresh one, which was never patched."""
    layers, layer = text_model(model).layers, sliding(model)
    index = list(layers).index(layer)
    fresh = type(layer)(text_config(model), index).eval()
    fresh.load_state_dict(layer.state_dict())
    layers[index] = fresh
    try:
        return both(model)
    finally:
        layers[index] = layer


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.found: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.found.append([type(value).__name__ for name, value in sorted(kwargs.items()) if "mask" in name])
        return self.inner(*args, **kwargs)


def wrapped_layer(model: Model) -> Found:
    layers, layer = text_model(model).layers, sliding(model)
    index = list(layers).index(layer)
    layers[index] = Wrapped(layer)
    try:
        return [*both(model), layers[index].found]
    finally:
        layers[index] = layer


def wrapped_attention(model: Model) -> Found:
    layer = sliding(model)
    attention = layer.self_attn
    layer.self_attn = Wrapped(attention)
    try:
        return [*both(model), layer.self_attn.found]
    finally:
        layer.self_attn = attention


def run_twice(model: Model) -> Found:
    layer = sliding(model)
    stock = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(stock(hidden_states, *args, **kwargs), *args, **kwargs)

    with replaced_forward(layer, forward):
        return [*outcome(generated, model), *outcome(scored, model)]


def deleted_layer(model: Model) -> Found:
    text, config = text_model(model), text_config(model)
    layers, count = text.layers, config.num_hidden_layers
    text.layers, config.num_hidden_layers = layers[: count - 1], count - 1
    try:
        return both(model)
    finally:
        text.layers, config.num_hidden_layers = layers, count


# -- hooks --


def seen_by(module: Callable[[Model], nn.Module], implementation: str = "sdpa", **options: Any) -> Use:
    """What a hook with arguments by name is shown."""

    def use(model: Model) -> Found:
        model.set_attn_implementation(implementation)
        found: Found = []

        def look(owner: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> None:
            kinds = {name: type(value).__name__ for name, value in kwargs.items() if "cache" not in name}
            kinds.pop("past_key_values", None)
            found.append([len(args), dict(sorted(kinds.items()))])
            found.extend(value for _, value in sorted(kwargs.items()) if isinstance(value, Tensor))
            found.extend(part for part in (output if isinstance(output, tuple) else [output]))

        owner = module(model)
        hooks = [
            owner.register_forward_pre_hook(look, with_kwargs=True),
            owner.register_forward_hook(look, with_kwargs=True),
        ]
        try:
            return [*both(model), *generated(model, **options), found]
        finally:
            for hook in hooks:
                hook.remove()

    return use


def read_weights(model: Model) -> Found:
    """By the commonest hook of all, without names."""
    model.set_attn_implementation("eager")
    found: Found = []
    hook = sliding(model).self_attn.register_forward_hook(lambda module, args, output: found.append(output[1]))
    try:
        return [*both(model), found]
    finally:
        hook.remove()


def read_weights_of_all_modules(model: Model) -> Found:
    model.set_attn_implementation("eager")
    found: Found = []
    inner = type(sliding(model).self_attn)

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if type(module) is inner:
            found.append(output[1])

    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        return [*both(model), found]
    finally:
        hook.remove()


def edited_mask(model: Model) -> Found:
    model.set_attn_implementation("eager")

    def edit(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None and mask.shape[-1] > 3:
            mask = mask.clone()
            mask[..., -3] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    hook = sliding(model).self_attn.register_forward_pre_hook(edit, with_kwargs=True)
    try:
        return both(model)
    finally:
        hook.remove()


def changed_output(model: Model) -> Found:
    hooks = [
        sliding(model).register_forward_hook(lambda module, args, output: output * 1.5),
        sliding(model).self_attn.register_forward_hook(lambda module, args, output: (output[0] * 0.5, output[1])),
        sliding(model).self_attn.q_proj.register_forward_hook(lambda module, args, output: output * 0.5),
    ]
    try:
        return both(model)
    finally:
        for hook in hooks:
            hook.remove()


def model_arguments(which: Callable[[Model], nn.Module], **options: Any) -> Use:
    """A hook that came after the patch, on a model around the layers, and reads what that is called with."""
    return functools.partial(_model_arguments, which, options)


def _model_arguments(which: Callable[[Model], nn.Module], options: dict[str, Any], model: Model) -> Found:
    found: Found = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        found.append(mask if not isinstance(mask, dict) else [part for _, part in sorted(mask.items())])
        found.append(kwargs.get("position_ids"))
        return args, kwargs

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        found.append([len(args), sorted(name for name in kwargs if name != cache_key(model))])

    owner = which(model)
    hooks = [
        owner.register_forward_pre_hook(look, with_kwargs=True),
        owner.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        steps = generated(model, **options)
        with torch.no_grad():
            owner(named_ids(model, 1, PROMPT), use_cache=False)
        return [*steps, inspect.signature(owner.forward), found]
    finally:
        for hook in hooks:
            hook.remove()


class Stop(Exception):  # noqa: N818  # as those of calibrators
    pass


def calibrated(model: Model) -> Found:
    """As quantizers do: the first layer's arguments are caught, and every layer is replayed with them."""
    layers = text_model(model).layers
    first, caught = layers[0], []

    class Catcher(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
            caught.append((hidden, kwargs))
            raise Stop

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    layers[0] = Catcher(first)
    try:
        with torch.no_grad(), pytest.raises(Stop):
            model(named_ids(model, 1, PROMPT), use_cache=False)
    finally:
        layers[0] = first
    return [*replayed(model, *caught[0]), *both(model)]


def calibrated_by_a_hook(model: Model) -> Found:
    caught: Found = []

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.append((args[0], kwargs))
        raise Stop

    hook = text_model(model).layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad(), pytest.raises(Stop):
            model(named_ids(model, 1, PROMPT), use_cache=False)
    finally:
        hook.remove()
    return [*replayed(model, *caught[0]), *both(model)]


def replayed(model: Model, hidden: Tensor, kwargs: dict[str, Any]) -> Found:
    found: Found = [kwargs["attention_mask"]]
    kinds = text_config(model).layer_types
    kwargs = {name: value for name, value in kwargs.items() if name != "shared_kv_states"}
    with torch.no_grad():
        for kind, layer in zip(kinds, text_model(model).layers, strict=True):
            if kind == SLIDING and not getattr(layer.self_attn, "is_kv_shared_layer", False):
                shares = "shared_kv_states" in str(inspect.signature(type(layer).forward))
                more: dict[str, Any] = {"shared_kv_states": {}} if shares else {}
                if getattr(layer, "hidden_size_per_layer_input", 0):
                    break  # its layers take an argument each, which a catcher of the first does not have
                hidden = layer(hidden, **kwargs, **more)
                found.append(hidden)
    return found


# -- embeddings --


class Wrap(nn.Module):
    """An embedding without a weight of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.inner(ids)
        return found


class Quantized(nn.Module):
    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        super().__init__()
        weight = inner.weight.detach()
        self.scale = weight.abs().max() / (100 if dtype == torch.int8 else 1)
        stored = (weight / self.scale).round() if dtype == torch.int8 else weight / self.scale
        self.weight = nn.Parameter(stored.to(dtype), requires_grad=False)
        self.factor = getattr(inner, "embed_scale", torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.view(torch.int8)[ids].view(self.weight.dtype)
        return rows.to(torch.float32) * self.scale * self.factor


def embedding(make: Callable[[Any], nn.Module], implementation: str) -> Use:
    def use(model: Model) -> Found:
        model.set_attn_implementation(implementation)
        text = text_model(model)
        before = text.embed_tokens
        text.embed_tokens = make(before)
        try:
            return both(model)
        finally:
            text.embed_tokens = before

    return use


# -- caches taken apart, and gradients --


def forked(model: Model) -> Found:
    """Three continuations of one prefix, in turns, each on layers that were copied one by one."""
    key, ids = cache_key(model), named_ids(model, 1, PROMPT + 3 * NEW)
    found = []
    with torch.no_grad():
        prefix = model(ids[:, :PROMPT], use_cache=True)[key]
        forks = [copy.copy(prefix) for _ in range(3)]
        for fork in forks:
            fork.layers = [copy.copy(layer) for layer in prefix.layers]
        for position in range(PROMPT, PROMPT + NEW):
            for number, fork in enumerate(forks):
                token = ids[:, position + number * NEW, None]
                found.append(model(token, **{key: fork}).logits)
    return found


def trimmed_by_type(model: Model) -> Found:
    """The last rows are kept, by code that goes by the classes of layers."""
    key, ids = cache_key(model), named_ids(model, 1, PROMPT + NEW)
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], use_cache=True)[key]
        kinds = [
            (isinstance(layer, DynamicLayer), isinstance(layer, DynamicSlidingWindowLayer)) for layer in cache.layers
        ]
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer):
                layer.keys, layer.values = layer.keys[:, :, -4:], layer.values[:, :, -4:]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = 4
        steps = [model(ids[:, position, None], **{key: cache}).logits for position in range(PROMPT, PROMPT + NEW)]
    return [kinds, *steps]


def ablated_head(model: Model) -> Found:
    """A part of what enters the output projection is zeroed in place, with gradients on."""

    def zero(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0][..., :4] = 0

    key, ids = cache_key(model), named_ids(model, 1, PROMPT + 3)
    model.set_attn_implementation("eager")  # where stock can go backward through it as well
    with hook(sliding(model).self_attn.o_proj, zero):
        output = model(ids[:, :PROMPT], use_cache=True)
        found = [output.logits]
        for position in range(PROMPT, PROMPT + 3):
            found.append(model(ids[:, position, None], **{key: output[key]}).logits)
        loss = model(ids, use_cache=False).logits.square().mean()
    loss.backward()
    found.append(sliding(model).self_attn.q_proj.weight.grad.clone())
    reset_grad(model)
    return [part.detach() for part in found]


@contextmanager
def hook(module: nn.Module, before: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def trained_prefix(model: Model) -> Found:
    """Rows that are parameters, written into one cache before each of several steps."""
    key, ids = cache_key(model), named_ids(model, 1, PROMPT + NEW)
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], use_cache=True)[key]
    rows = [
        [part.detach().clone().requires_grad_() for part in (layer.keys, layer.values)]
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]
    holding = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    found = []
    for _ in range(3):
        for layer, (keys, values) in zip(holding, rows, strict=True):
            layer.keys, layer.values = keys * 1.0, values * 1.0
            layer.cumulative_length = PROMPT
        model(ids[:, PROMPT:], **{key: cache}).logits.square().mean().backward()
        found += [part.grad.clone() for pair in rows for part in pair]
        reset_grad(model)
    return found


USES: dict[str, Use] = {
    "torch_kernel": torch_kernel,
    "torch_kernel_of_ones_own": torch_kernel_of_ones_own,
    "torch_kernel_that_is_trained": torch_kernel_that_is_trained,
    "torch_kernel_by_a_mode": torch_kernel_by_a_mode,
    "torch_kernel_not_used_by_eager": torch_kernel_not_used_by_eager,
    "registered_sdpa": registered("sdpa"),
    "registered_name": registered("somebody_s"),
    "eager_function": eager_function,
    "mask_function": mask_function,
    "mask_maker": mask_maker,
    "softmax_of_eager": softmax_of_eager,
    "rotation": rotation,
    "overlay": overlay,
    "registered_module": registered_module,
    "torch_kernel_without_masks": torch_kernel_without_masks,
    "stock_layer_update": stock_layer_update,
    "traced": traced,
    "module_call": module_call,
    "outer_class_forward": outer_class_forward,
    "prepared_inputs": prepared_inputs,
    "global_layer_is_seen": seen_by(lambda model: text_model(model).layers[text_config(model).layer_types.index(FULL)]),
    "last_attention_is_seen": seen_by(lambda model: text_model(model).layers[-1].self_attn),
    "class_forward": class_forward,
    "layer_class_forward": layer_class_forward,
    "eager_in_one_layer": eager_in_one_layer,
    "skip_first": skipping(0),
    "skip_second": skipping(1),
    "skip_second_at_times": skipping(1, lambda step: step % 2 == 1),
    "skip_second_in_decode": skipping(1, lambda step: step > 0),
    "skip_second_in_prefill": skipping(1, lambda step: step == 0),
    "skip_first_at_times": skipping(0, lambda step: step % 3 == 1),
    "skipped_attention": skipped_attention,
    "proxied_layer": proxied_layer,
    "replaced_layer": replaced_layer,
    "wrapped_layer": wrapped_layer,
    "wrapped_attention": wrapped_attention,
    "run_twice": run_twice,
    "deleted_layer": deleted_layer,
    "layer_is_seen": seen_by(sliding),
    "attention_is_seen": seen_by(lambda model: sliding(model).self_attn),
    "eager_layer_is_seen": seen_by(sliding, "eager"),
    "eager_attention_is_seen": seen_by(lambda model: sliding(model).self_attn, "eager"),
    "static_attention_is_seen": seen_by(lambda model: sliding(model).self_attn, "eager", **STATIC),
    "read_weights": read_weights,
    "read_weights_of_all_modules": read_weights_of_all_modules,
    "edited_mask": edited_mask,
    "changed_output": changed_output,
    "text_model_arguments": model_arguments(text_model),
    "inner_model_arguments": model_arguments(lambda model: model.model),
    "model_arguments": model_arguments(lambda model: model),
    "text_model_arguments_static": model_arguments(text_model, **STATIC),
    "inner_model_arguments_static": model_arguments(lambda model: model.model, **STATIC),
    "model_arguments_static": model_arguments(lambda model: model, **STATIC),
    "calibrated": calibrated,
    "calibrated_by_a_hook": calibrated_by_a_hook,
    "wrapped_embedding": embedding(Wrap, "sdpa"),
    "wrapped_embedding_eager": embedding(Wrap, "eager"),
    "int8_embedding": embedding(lambda inner: Quantized(inner, torch.int8), "eager"),
    "float8_embedding": embedding(lambda inner: Quantized(inner, torch.float8_e4m3fn), "eager"),
    "forked_layers": forked,
    "trimmed_by_type": trimmed_by_type,
    "ablated_head": ablated_head,
    "trained_prefix": trained_prefix,
}


def outcome(use: Use, model: Model) -> Found:
    """What came of it, or the kind of error."""
    try:
        return use(model)
    except Exception as error:
        return [type(error)]


def assert_alike(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    elif isinstance(want, dict):
        assert_alike(sorted(got), sorted(want))
        assert_alike([got[name] for name in want], list(want.values()))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for pair in zip(got, want, strict=True):
            assert_alike(*pair)
    else:
        assert got == want


def reset_grad(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("before", (text_model, lambda model: model.model), ids=("text model", "inner model"))
@pytest.mark.parametrize("options", ({}, STATIC), ids=("dynamic", "static"))
def test_a_forward_wrapped_before_the_patch(
    before: Callable[[Model], Any], options: dict[str, Any], model_kind: Species, layout: str
) -> None:
    """It is shown what stock shows, under whatever names it has for its arguments."""
    model = model_kind.build(WINDOW)
    owner = before(model)
    stock, found = owner.forward, []

    def mine(*given: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        found.append(mask if not isinstance(mask, dict) else [part for _, part in sorted(mask.items())])
        return stock(*given, **kwargs)

    owner.forward = mine
    want = [*generated(model, **options), *scored(model), found.copy()]
    found.clear()
    with swapatch.patch(model, layout=layout):
        got = [*generated(model, **options), *scored(model), found]
    assert_alike(got, want)
    assert owner.forward is mine


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_as_stock(use: Use, model_kind: Species, layout: str) -> None:
    model = model_kind.build(WINDOW)
    want = outcome(use, model)
    reset_grad(model)
    model.set_attn_implementation("sdpa")
    with swapatch.patch(model, layout=layout):
        got = outcome(use, model)
    assert_alike(got, want)


def test_a_way_of_ones_own_to_make_masks_ahead(model_kind: Species, layout: str) -> None:
    """Where `generate` looks for it, before the patch: everybody sees the first key."""
    model = model_kind.build(WINDOW)
    stock = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)

    def mine(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        return {name: mask if mask is None else mask | (mask.cumsum(-1) < 2) for name, mask in made.items()}

    model.create_masks_for_generate = mine
    want = generated(model, **STATIC)
    with pytest.raises(AssertionError):
        assert_alike(generated(model_kind.build(WINDOW), **STATIC), want)
    with swapatch.patch(model, layout=layout):
        assert_alike(generated(model, **STATIC), want)
