"""Shared by all tests: how hypothesis runs where the machine's speed varies."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tieredkv", deadline=None, print_blob=True)
settings.load_profile("tieredkv")
