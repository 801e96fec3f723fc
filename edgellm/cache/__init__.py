"""The KV cache: blocks, sequences over them, cached prefixes, copies on disk and device."""
