"""The KV cache: blocks, sequences over them, prefixes found again, disk and device."""
