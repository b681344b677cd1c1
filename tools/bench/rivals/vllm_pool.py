"""vLLM's block pool: the hit of a prompt, hashing included, with its default hash."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from ..child import Say


def look_up(say: Say, num_tokens: int, block_size: int, rounds: int) -> dict[str, Any]:
    """Seconds to hash the prompt of a new request and to find its blocks, all of them cached."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(block_size, hash_fn)
    ids = [number * 7919 % 131072 for number in range(num_tokens)]
    num_blocks = num_tokens // block_size
    pool = BlockPool(num_gpu_blocks=num_blocks + 8, enable_caching=True, hash_block_size=block_size)

    def request(number: int) -> Any:
        params = SamplingParams(max_tokens=1)
        return Request(f"r{number}", ids, params, None, block_hasher=hasher)

    first = request(0)
    pool.cache_full_blocks(first, pool.get_new_blocks(num_blocks), 0, num_blocks, block_size, 0)
    seconds, found = [], 0
    for number in range(rounds):
        began = time.perf_counter()
        hashes = request(number + 1).block_hashes
        found = sum(pool.get_cached_block(one, [0]) is not None for one in hashes)
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds), "num_found": found, "num_blocks": num_blocks}
