"""What `bench_chat.py` measures: chats with a real model, cold and from every tier, beside its rivals."""
