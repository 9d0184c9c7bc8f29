"""What swapatch stands in for is as it was when swapatch was written; a version that changed it is named."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import cache_utils, masking_utils
from transformers.generation import GenerationMixin
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4_unified import modeling_gemma4_unified
from zoo import BY_NAME

import swapatch
from swapatch import _compat

# Replaced functions, and those whose behaviour ours repeats, with the fingerprints seen in transformers 5.15 to 5.24.
KNOWN: dict[Callable[..., Any], tuple[str, ...]] = {
    modeling_gemma3.Gemma3Attention.forward: ("76ab8c3d6bd2", "caac12a35fa6"),
    modeling_gemma4.Gemma4TextAttention.forward: ("b3698f93920c", "70af31150b71", "fa3894fc15e2"),
    modeling_gemma4_unified.Gemma4UnifiedTextAttention.forward: ("b3698f93920c", "70af31150b71", "fa3894fc15e2"),
    modeling_gemma3.apply_rotary_pos_emb: ("78f654a6b1ef",),
    modeling_gemma4.apply_rotary_pos_emb: ("eaa6ea5b9c2b",),
    modeling_gemma4_unified.apply_rotary_pos_emb: ("eaa6ea5b9c2b",),
    cache_utils.DynamicSlidingWindowLayer.update: ("8358fa68fb07", "37f37c97e5d5"),
    cache_utils.DynamicSlidingWindowLayer.get_mask_sizes: ("698080d5d60f",),
    cache_utils.DynamicSlidingWindowLayer.crop: ("9df88f6c7508",),
    masking_utils.sliding_window_overlay: ("836d44b4d192",),
    GenerationMixin._prepare_cache_for_generation: ("0e8172fdbd11", "3f6181f4309f", "fde35752ca82", "25dc9361a681"),
}


class _Plain(ast.NodeTransformer):
    """Drops what does not change behaviour: docstrings, annotations, decorators, and the two names of the cache."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg("cache" if node.arg == "past_key_values" else node.arg)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("cache" if node.id == "past_key_values" else node.id, node.ctx)


def fingerprint(function: Callable[..., Any]) -> str:
    tree = _Plain().visit(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


@pytest.mark.parametrize("function", KNOWN, ids=lambda function: function.__qualname__)
def test_upstream_is_as_known(function: Callable[..., Any]) -> None:
    found = fingerprint(function)
    assert found in KNOWN[function], (
        f"transformers {transformers.__version__} has changed {function.__module__}.{function.__qualname__} "
        f"(fingerprint {found}): read the change, adapt swapatch to it if need be, then add the fingerprint here"
    )


def test_a_misfit_is_refused_and_nothing_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, hidden_states: Any, something_new: Any) -> None: ...

    model = BY_NAME["gemma3_text"].build(8)
    monkeypatch.setattr(modeling_gemma3.Gemma3Attention, "forward", forward)
    with pytest.raises(swapatch.UnsupportedVersionError, match="without position_embeddings, attention_mask"):
        swapatch.patch(model)
    assert not swapatch.is_patched(model)
    assert issubclass(swapatch.UnsupportedVersionError, ImportError)


def test_tested_versions_cover_the_installed_one() -> None:
    assert _compat.OLDEST <= tuple(map(int, transformers.__version__.split(".")[:2])) <= _compat.NEWEST


if __name__ == "__main__":  # prints the fingerprints of the installed version, to be added above
    for known in KNOWN:
        print(known.__qualname__, fingerprint(known))
