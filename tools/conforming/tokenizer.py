"""A tokenizer of bytes, for models whose weights are random."""

from __future__ import annotations

from functools import cache
from typing import Any

_SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>")
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_tokenizer() -> Any:
    """Ids 0 to 7 are special, 8 + b is byte b in the order of the byte-level alphabet."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {t: i for i, t in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
