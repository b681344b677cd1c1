"""What a model is: anything that changes KV changes the digest and is named, nothing else does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as T
from tiny_models import (
    BASE,
    FAMILIES,
    WINDOWED,
    build,
    deepseek_v3,
    gemma3,
    gemma4,
    glm_moe_dsa,
    llama,
    mistral,
)

from tieredkv.block.identity import differences
from tieredkv.errors import Unsupported
from tieredkv.hf import describe_model, layout_of
from tieredkv.hf.identity import fingerprint, read_model, rehash


def differs(one: Any, other: Any, **other_options: Any) -> list[str]:
    """The fields that differ; their digests must differ exactly when there are some."""
    (mine, layout), (theirs, their_layout) = describe_model(one), describe_model(other, **other_options)
    names = differences(
        {**mine.fingerprint(), "layout": layout.describe()},
        {**theirs.fingerprint(), "layout": their_layout.describe()},
    )
    assert (mine.digest(layout) == theirs.digest(their_layout)) == (names == [])
    return names


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_model_built_again_is_the_same(name: str) -> None:
    assert differs(FAMILIES[name](), FAMILIES[name]()) == []


def test_a_copy_and_another_name_are_the_same() -> None:
    model = llama()
    other = copy.deepcopy(model)
    other.config._name_or_path = "somewhere/else"
    other.config.use_cache = False
    other.generation_config.eos_token_id = 77
    assert differs(model, other) == []


def test_one_weight() -> None:
    other = llama()
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[3, 4] += 1e-6
    assert differs(llama(), other) == ["weights"]


def test_dtype() -> None:
    names = differs(llama(), llama().to(torch.bfloat16))
    assert {"dtypes.weights", "dtypes.kv", "weights"} <= set(names)


def test_rope() -> None:
    scaled = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert "config.rope_parameters.factor" in differs(llama(), scaled)
    overridden = llama()
    overridden.config.rope_parameters = {**overridden.config.rope_parameters, "rope_theta": 5.0}
    assert differs(llama(), overridden) == ["config.rope_parameters.rope_theta"]


def test_window() -> None:
    assert "config.sliding_window" in differs(mistral(40), mistral(41))


def test_salt_is_named_but_not_told() -> None:
    assert differs(llama(), llama(), salt="tenant") == ["salt"]
    identity, _ = describe_model(llama(), salt="secret tenant")
    assert "secret tenant" not in json.dumps(identity.fingerprint()) + repr(identity)


def test_attention_kernels() -> None:
    other = llama()
    other.set_attn_implementation("eager")
    assert differs(llama(), other) == ["framework.attention"]


def test_block_size_is_in_the_layout() -> None:
    assert differs(llama(), llama(), block_size=64) == ["layout.block_size"]


def test_an_unknown_config_field_counts() -> None:
    other = llama()
    other.config.some_future_knob = 3
    assert differs(llama(), other) == ["config.some_future_knob"]


class Tuned(torch.nn.Module):
    """A linear layer with adapters, with the attributes that PEFT's layers have."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: torch.nn.Linear, names: list[str]) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict(
            {n: torch.nn.Linear(base.in_features, 2, bias=False) for n in names}
        )
        self.lora_B = torch.nn.ModuleDict(
            {n: torch.nn.Linear(2, base.out_features, bias=False) for n in names}
        )
        self.scaling = dict.fromkeys(names, 1.0)
        self.active_adapters, self.merged, self.disable_adapters = names[:1], False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        if not self.disable_adapters:
            for name in self.active_adapters:
                out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


def with_adapters(change: Callable[[Tuned], None] = lambda _layer: None) -> Any:
    model = llama()
    torch.manual_seed(5)
    attention = model.model.layers[1].self_attn
    attention.k_proj = Tuned(attention.k_proj, ["legal", "poetry"]).eval()
    change(attention.k_proj)
    return model


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda layer: setattr(layer, "active_adapters", ["poetry"]), ["adapters.legal", "adapters.poetry"]),
        (lambda layer: layer.scaling.update(legal=2.0), ["adapters.legal"]),
        (lambda layer: torch.nn.init.ones_(layer.lora_A["legal"].weight), ["adapters.legal"]),
        (lambda layer: torch.nn.init.ones_(layer.lora_A["poetry"].weight), []),
        (lambda layer: setattr(layer, "disable_adapters", True), ["adapters", "adapters.legal"]),
    ],
)
def test_adapters_count_by_content_when_active(change: Callable[[Tuned], None], names: list[str]) -> None:
    assert differs(with_adapters(), with_adapters(change)) == names
    assert (fingerprint(with_adapters()) == fingerprint(with_adapters())) is False, (
        "it speaks of live tensors"
    )


def test_the_fingerprint_sees_every_change_of_a_live_model() -> None:
    model = with_adapters()
    layer = model.model.layers[1].self_attn.k_proj
    marks = [fingerprint(model)]

    def changed(by: Callable[[], Any]) -> bool:
        by()
        marks.append(fingerprint(model))
        return marks[-1] not in marks[:-1]

    assert fingerprint(model) == marks[0]
    with torch.no_grad():
        assert changed(lambda: model.lm_head.weight.mul_(2))
    assert changed(lambda: layer.active_adapters.append("poetry"))
    assert changed(lambda: layer.scaling.update(poetry=0.5))
    assert changed(lambda: setattr(model.config, "sliding_window", 9))
    assert changed(lambda: model.set_attn_implementation("eager"))
    assert changed(lambda: model.to(torch.bfloat16))
    assert changed(lambda: model.train())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_training_makes_another_model(options: dict[str, bool]) -> None:
    """A fused optimizer, the default of `TrainingArguments`, writes without counting up any version."""
    model = llama()
    before, mark = read_model(model).identity, fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    ids = torch.arange(8, 40)[None]
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    model.eval()
    assert fingerprint(model) != mark
    assert read_model(model).identity.weights != before.weights


def test_a_merged_adapter_makes_other_weights() -> None:
    """PEFT writes it into the base weights through `.data`, which counts up no version either."""
    model = with_adapters()
    layer = model.model.layers[1].self_attn.k_proj
    before, mark = read_model(model).identity, fingerprint(model)
    layer.base_layer.weight.data += layer.lora_B["legal"].weight.data @ layer.lora_A["legal"].weight.data
    layer.merged, layer.merged_adapters = True, ["legal"]
    assert fingerprint(model) != mark
    merged = read_model(model).identity
    assert merged.weights != before.weights and not merged.adapters
    layer.base_layer.weight.data -= layer.lora_B["legal"].weight.data @ layer.lora_A["legal"].weight.data
    layer.merged, layer.merged_adapters = False, []
    assert read_model(model).identity.weights != merged.weights


def test_a_learned_prompt_is_refused() -> None:
    model = llama()
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    with pytest.raises(Unsupported, match="learned prompt"):
        read_model(model)
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=False)}
    read_model(model)


def test_writing_through_data_needs_a_rehash() -> None:
    model = llama()
    before = read_model(model).identity.weights
    model.lm_head.weight.data[0, 0] += 1
    assert read_model(model).identity.weights == before
    rehash(model)
    assert read_model(model).identity.weights != before


def test_large_tensors_are_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.hf.weights._CHUNK_NBYTES", 1000)
    model = llama()
    before = read_model(model).identity.weights
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert read_model(model).identity.weights != before


def test_layouts_tell_what_is_really_cached() -> None:
    groups = layout_of(deepseek_v3(), 16).groups
    shapes = {(t.name, t.shape) for t in groups[0].tensors}
    assert shapes == {("keys", (1, -1, 16)), ("values", (1, -1, 8))}, (
        "MLA caches its latent and its rope part"
    )
    groups = layout_of(gemma4(), 16).groups
    assert {t.layer for g in groups for t in g.tensors} == {0, 1}, "layers 2 and 3 share the KV of others"
    for name in WINDOWED:
        windows = [g.window for g in layout_of(FAMILIES[name](), 16).groups]
        assert windows[-1] in (8, 40) and windows[0] in (0, 40)
    assert layout_of(gemma3(), 16) == describe_model(gemma3(), 16)[1]


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (lambda: T.RecurrentGemmaConfig(**{**BASE, "attention_window_size": 40}), T.RecurrentGemmaForCausalLM,
         "keeps a state outside any cache"),
        (lambda: T.RwkvConfig(vocab_size=264, hidden_size=64, num_hidden_layers=2), T.RwkvForCausalLM,
         "takes no KV cache"),
        (lambda: T.Gemma3TextConfig(**{**BASE, "head_dim": 16, "use_bidirectional_attention": True}),
         T.Gemma3ForCausalLM, "depend on the tokens after it"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_into_blocks_are_refused(
    config: Callable[[], Any], kind: Any, reason: str
) -> None:
    model = build(config(), kind)
    with pytest.raises(Unsupported, match=reason):
        describe_model(model)
    with pytest.raises(Unsupported, match=reason):
        layout_of(model)


def test_sparse_attention_that_selects_otherwise_behind_a_prefix_is_refused() -> None:
    """As transformers 5.15 does with sdpa, and only where more is cached than the index selects."""
    model = glm_moe_dsa()
    layout_of(model)
    cached = [0]

    def before(_model: Any, _args: Any, given: dict[str, Any]) -> None:
        cached[0] = given["cache"].get_seq_length()

    def after(_mlp: Any, _args: Any, out: Any) -> Any:
        return out * 1.5 if cached[0] >= model.config.index_topk else out

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.model.layers[0].mlp.register_forward_hook(after)
    with pytest.raises(Unsupported, match=r"selects other tokens behind a prefix.*eager"):
        layout_of(model)


def test_other_refusals_say_why() -> None:
    with pytest.raises(Unsupported, match="encoder-decoder"):
        describe_model(
            T.T5ForConditionalGeneration(T.T5Config(d_model=32, d_ff=32, num_layers=1, vocab_size=9)).eval()
        )
    with pytest.raises(Unsupported, match="training mode"):
        describe_model(llama().train())
    with pytest.raises(Unsupported, match="not a transformers model"):
        describe_model(torch.nn.Linear(2, 2).eval())
    bert = T.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(Unsupported, match="depend on the tokens after it"):
        describe_model(build(bert, T.BertModel))
    offloaded = llama()
    offloaded.lm_head.weight = torch.nn.Parameter(torch.empty(264, 64, device="meta"))
    with pytest.raises(Unsupported, match="meta"):
        describe_model(offloaded)


def test_a_rope_that_depends_on_the_length_limits_what_is_certain() -> None:
    assert read_model(llama()).position_limit is None
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = llama(rope_parameters=rope, max_position_embeddings=64)
    facts = read_model(dynamic)
    assert facts.position_limit == 64
    with torch.no_grad():
        dynamic(torch.arange(80)[None] % 264)
    assert read_model(dynamic).identity == facts.identity, (
        "what a forward rewrites is no part of the identity"
    )
