"""What a block is: its bytes, its restorable boundaries, its digests, its identity. All pure."""
